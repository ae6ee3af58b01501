"""`hf-vit finetune`, `pretrain`, `evaluate`, `recipes`, `launch-configs` and `shard`."""

import argparse
import os
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from ..files.messages import did_you_mean
from .arguments import Commands, add_command

_PAGES = {  # scripts of the folder training/, installed as hf_vit.scripts
    "finetune": "fine-tune a model on your images",
    "pretrain": "train a model from random weights, with labels or by masked patch prediction",
    "evaluate": "evaluate a model: accuracy, ReaL, ObjectNet, few-shot, linear probe, k-NN or VTAB",
}


def add_commands(commands: Commands) -> None:
    """Add the training scripts (whose settings have their own parser), the two listings, and `shard`."""
    for name, about in _PAGES.items():
        command = commands.add_parser(name, help=about, add_help=False)
        command.set_defaults(run=_run, takes_settings=True)
    about = "list the recipes, or show one"
    _add_listing(commands, "recipes", about, _list_recipes, "name of a recipe, for --recipe")
    about = "list the launch templates, or show one, for `accelerate launch --config_file FILE`"
    _add_listing(commands, "launch-configs", about, _list_launch_configs, "name of a template")
    _add_shard(commands)


def _run(arguments: argparse.Namespace) -> None:
    import_module(f"hf_vit.scripts.{arguments.command}").main(arguments.settings)


def _add_listing(commands: Commands, name: str, about: str, run: Any, what: str) -> None:
    command = add_command(commands, name, run, about)
    command.add_argument("action", nargs="?", choices=["show", "path"], help="print the file, or its path")
    command.add_argument("name", nargs="?", help=what)


def _list_recipes(arguments: argparse.Namespace) -> None:
    from ..training.recipes import about_recipe, find_recipe, installed_recipes

    if arguments.action:
        _show(arguments, find_recipe(arguments.name) if arguments.name else None)
        return
    for name, path in installed_recipes().items():
        about = about_recipe(path)
        print(name)
        for line in (about.what, f"Hardware: {about.hardware}", f"Expect {about.expected}"):
            print(f"    {line}")


def _list_launch_configs(arguments: argparse.Namespace) -> None:
    folder = Path(str(resources.files("hf_vit.scripts"))) / "accelerate"
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    from ..files.reading import read_text

    if arguments.action:
        if arguments.name and arguments.name not in files:
            hint = did_you_mean(arguments.name, files)
            raise ValueError(f"there is no launch template {arguments.name} (there is {', '.join(files)}){hint}")
        _show(arguments, files.get(arguments.name))
        return
    for name, path in files.items():
        print(f"{name:12} {read_text(path).splitlines()[0].removeprefix('# ')}")


def _show(arguments: argparse.Namespace, path: Path | None) -> None:
    if path is None:
        raise ValueError(f"{arguments.action} needs a name; `hf-vit {arguments.command}` lists them")
    from ..files.reading import read_text

    print(path if arguments.action == "path" else read_text(path).rstrip())


def _add_shard(commands: Commands) -> None:
    about = "write a data set as shuffled WebDataset tars with an index; after an interruption, run it again"
    command = add_command(commands, "shard", _shard, about)
    command.add_argument("source", help="data set: a folder of images, any other --dataset of finetune, or a Hub name")
    command.add_argument("output", type=Path, help="folder to write")
    command.add_argument("--config", help="configuration of a Hub data set that has several")
    command.add_argument("--splits", nargs="+", default=[], metavar="SPLIT", help="splits to write (default: all)")
    command.add_argument(
        "--size", type=int, metavar="PIXELS", help="resize larger images to this shorter side, and store all as JPEGs"
    )
    command.add_argument("--quality", type=int, default=95, help="quality of these JPEGs (default 95)")
    command.add_argument("--images", type=int, default=10_000, help="images per shard (default 10000)")
    command.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="number of processes (default: one per processor)"
    )


def _shard(arguments: argparse.Namespace) -> None:
    from ..data.shard_writing import ShardPlan, write_shards

    plan = ShardPlan(arguments.source, arguments.config, arguments.size, arguments.quality, arguments.images)
    for split, count in write_shards(plan, arguments.output, arguments.splits, arguments.workers).items():
        print(f"{arguments.output}/{split}-*.tar: {count} images")
