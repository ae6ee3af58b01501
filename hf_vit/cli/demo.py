"""`hf-vit demo`."""

import argparse

from .arguments import Commands, add_command


def add_commands(commands: Commands) -> None:
    """Add `demo`."""
    command = add_command(
        commands, "demo", _demo, "show a page that classifies a picture and marks where the model looks"
    )
    command.add_argument("folder", help="a folder of save_pretrained, or a name on the Hub")
    command.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines see it too")
    command.add_argument("--port", type=int, help="by default the first free one from 7860")
    command.add_argument("--open", action="store_true", help="open the page in a browser")


def _demo(arguments: argparse.Namespace) -> None:
    if arguments.port is not None and not 1 <= arguments.port <= 65535:
        raise ValueError(f"--port is {arguments.port}; it must be at least 1 and at most 65535")
    from ..demo.page import serve

    serve(arguments.folder, arguments.host, arguments.port, arguments.open)
