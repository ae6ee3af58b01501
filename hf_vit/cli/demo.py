"""`hf-vit demo`."""

import argparse
from pathlib import Path

from ..files.image_files import images_below
from ..files.progress import silence_progress_bars
from .arguments import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Add `demo`."""
    command = add_command(
        commands, "demo", _demo, "serve a page that classifies images and shows the attention of one or two models"
    )
    command.add_argument("folder", help="model: a folder of save_pretrained, or a name on the Hub")
    command.add_argument("other", nargs="?", help="second model, shown side by side")
    command.add_argument(
        "--examples", type=Path, metavar="FOLDER", help="folder of example images (default: built-in drawings)"
    )
    command.add_argument("--host", help="address of the page (default 127.0.0.1); 0.0.0.0 is open to other machines")
    command.add_argument("--port", type=int, help="port of the page (default: the first free one from 7860)")
    command.add_argument("--open", action="store_true", help="open the page in a browser")
    command.add_argument(
        "--space", type=Path, metavar="FOLDER", help="write the page as a Space for the Hub to this folder, and exit"
    )
    command.add_argument(
        "--wheel", type=Path, metavar="FILE", help="for --space: wheel of hf_vit to install, instead of a package index"
    )


def _demo(arguments: argparse.Namespace) -> None:
    if arguments.port is not None and not 1 <= arguments.port <= 65535:
        raise ValueError(f"--port is {arguments.port}; it must be at least 1 and at most 65535")
    silence_progress_bars()
    folders = [folder for folder in (arguments.folder, arguments.other) if folder]
    if arguments.space:
        if given := [name for name in ("examples", "host", "port", "open") if getattr(arguments, name)]:
            raise ValueError(f"--{given[0]} has no effect on --space, which only writes files; leave it out")
        _write_space(folders, arguments)
        return
    if arguments.wheel:
        raise ValueError("--wheel needs --space")
    if arguments.examples:
        images_below(arguments.examples)  # an error before the models are loaded, if there are no images
    from ..demo.page import serve

    serve(folders, arguments.examples, arguments.host or "127.0.0.1", arguments.port, arguments.open)


def _write_space(folders: list[str], arguments: argparse.Namespace) -> None:
    from ..demo.looking import Demo
    from ..demo.space import write_space

    for folder in folders:
        Demo(folder)  # an error now instead of in the Space
    write_space(arguments.space, folders, arguments.wheel)
    print(f"written to {arguments.space}; its README.md explains how to upload it to the Hub")
