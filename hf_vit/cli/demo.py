"""`hf-vit demo`."""

import argparse
from pathlib import Path

from ..files.image_files import images_below
from .arguments import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Add `demo`."""
    command = add_command(
        commands, "demo", _demo, "show a page that classifies pictures and marks where a model looks, or two"
    )
    command.add_argument("folder", help="a folder of save_pretrained, or a name on the Hub")
    command.add_argument("other", nargs="?", help="another model, to compare side by side")
    command.add_argument(
        "--examples", type=Path, metavar="FOLDER", help="of images to choose from (default: drawn ones)"
    )
    command.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines see it too")
    command.add_argument("--port", type=int, help="by default the first free one from 7860")
    command.add_argument("--open", action="store_true", help="open the page in a browser")
    command.add_argument(
        "--space", type=Path, metavar="FOLDER", help="write a Space for the Hub there, and show nothing"
    )
    command.add_argument("--wheel", type=Path, metavar="FILE", help="of hf_vit, for a --space: until an index has it")


def _demo(arguments: argparse.Namespace) -> None:
    if arguments.port is not None and not 1 <= arguments.port <= 65535:
        raise ValueError(f"--port is {arguments.port}; it must be at least 1 and at most 65535")
    folders = [folder for folder in (arguments.folder, arguments.other) if folder]
    if arguments.space:
        _write_space(folders, arguments)
        return
    if arguments.wheel:
        raise ValueError("--wheel is for a Space, and there is no --space")
    if arguments.examples:
        images_below(arguments.examples)  # refuses a place without images before the models are loaded
    from ..demo.page import serve

    serve(folders, arguments.examples, arguments.host, arguments.port, arguments.open)


def _write_space(folders: list[str], arguments: argparse.Namespace) -> None:
    from ..demo.looking import Demo
    from ..demo.space import write_space

    for folder in folders:
        Demo(folder)  # refuses what the page would refuse
    write_space(arguments.space, folders, arguments.wheel)
    print(f"written to {arguments.space}: its README.md says how it gets onto the Hub")
