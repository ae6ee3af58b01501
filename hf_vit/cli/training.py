"""`hf-vit train`, `hf-vit evaluate` and `hf-vit shard`."""

import argparse
import os
from pathlib import Path

from .arguments import Commands, add_command

_ABOUT = {
    "train": "fine-tune the model of --model, or without one train from random weights",
    "evaluate": "measure a model: accuracy, ReaL, ObjectNet, few-shot, linear probe, k-NN or VTAB",
}


def add_commands(commands: Commands) -> None:
    """Add `train` and `evaluate`, whose settings have a parser of their own, and `shard`."""
    for name, about in _ABOUT.items():
        command = commands.add_parser(name, help=about, add_help=False)
        command.set_defaults(run=_run, takes_settings=True)
    _add_shard(commands)


def _add_shard(commands: Commands) -> None:
    about = "write a data set as shuffled WebDataset tars with an index; run it again to go on after an interruption"
    command = add_command(commands, "shard", _shard, about)
    command.add_argument("source", help="a folder of images or whatever else train reads, or a name on the Hub")
    command.add_argument("output", type=Path, help="a folder")
    command.add_argument("--config", help="of a data set on the Hub that has several")
    command.add_argument("--splits", nargs="+", default=[], metavar="SPLIT", help="by default all that there are")
    command.add_argument("--size", type=int, metavar="PIXELS", help="shorter side of images that are larger, as JPEGs")
    command.add_argument("--quality", type=int, default=95, help="of the JPEGs (default 95)")
    command.add_argument("--images", type=int, default=10_000, help="of a shard (default 10000)")
    command.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all processors)")


def _shard(arguments: argparse.Namespace) -> None:
    from ..training.shard_writing import ShardPlan, write_shards

    plan = ShardPlan(arguments.source, arguments.config, arguments.size, arguments.quality, arguments.images)
    for split, count in write_shards(plan, arguments.output, arguments.splits, arguments.workers).items():
        print(f"{arguments.output}/{split}-*.tar: {count} images")


def _run(arguments: argparse.Namespace) -> None:
    from ..training import commands

    if arguments.command == "evaluate":
        from ..evaluation.commands import evaluate

        commands.main(evaluate, arguments.settings)
    elif any(setting.split("=")[0] == "--model" for setting in arguments.settings):
        commands.main(commands.finetune, arguments.settings)
    else:
        commands.main(commands.pretrain, arguments.settings)
