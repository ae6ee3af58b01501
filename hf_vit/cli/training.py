"""`hf-vit train` and `hf-vit evaluate`."""

import argparse

from .arguments import Commands

_ABOUT = {
    "train": "fine-tune the model of --model, or without one train from random weights",
    "evaluate": "measure a model: accuracy, ReaL, ObjectNet, few-shot, linear probe, k-NN or VTAB",
}


def add_commands(commands: Commands) -> None:
    """Add `train` and `evaluate`, whose settings have a parser of their own."""
    for name, about in _ABOUT.items():
        command = commands.add_parser(name, help=about, add_help=False)
        command.set_defaults(run=_run, takes_settings=True)


def _run(arguments: argparse.Namespace) -> None:
    from ..training import commands

    if arguments.command == "evaluate":
        from ..evaluation.commands import evaluate

        commands.main(evaluate, arguments.settings)
    elif any(setting.split("=")[0] == "--model" for setting in arguments.settings):
        commands.main(commands.finetune, arguments.settings)
    else:
        commands.main(commands.pretrain, arguments.settings)
