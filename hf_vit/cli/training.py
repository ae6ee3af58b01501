"""`hf-vit recipes`, `launch-configs` and `shard`."""

import argparse
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import Annotated, Any, Literal

from ..files.messages import silence_progress_bars
from ..models.utils import check_choice, read_text
from ..settings.parser import OptionParser
from .arguments import add_arguments, parse_count, parse_positive

_Action = Annotated[Literal["show", "path"] | None, "print the file, or its path"]


@dataclass(kw_only=True)
class _HubOptions:
    """Options of the scripts besides their settings; `add_arguments` reads the fields."""

    push: Annotated[
        str | None,
        "Hub repository to push to at the end: finetune and pretrain push the model; audit and evaluate push their "
        "results as a data set",
        "NAME",
    ] = None
    job: Annotated[
        str | None, "run on Hugging Face Jobs, on hardware such as a10g-small; needs --push and --package", "FLAVOR"
    ] = None
    package: Annotated[
        str | None, "for --job: pip requirement of hf_vit: the URL of a wheel, or git+https://...", "REQUIREMENT"
    ] = None
    timeout: Annotated[str, "for --job: time limit, such as 90m", "TIME"] = "6h"
    dry_run: Annotated[bool, "for --job: check the settings, data and model, but start nothing"] = False


def run_script(command: str, options: list[str]) -> None:
    """Run a script of the folder training/, locally or as a job, and push its result if requested."""
    from ..settings.options import parse_settings

    parser = OptionParser(add_help=False, usage=argparse.SUPPRESS)
    add_arguments(parser.add_argument_group("Hub and Jobs"), _HubOptions)
    given, rest = parser.parse_known_args(options)
    if {"-h", "--help"} & {*rest}:
        with suppress(SystemExit):
            parse_settings(settings_of(command), ["--help"], f"hf-vit {command}")
        print(f"\n{parser.format_help()}", end="")
        return
    script = import_module(f"hf_vit.scripts.{command}").main
    hub = _HubOptions(**vars(given))
    if "" in (hub.push, hub.job, hub.package):
        raise ValueError("--push, --job or --package is empty")
    if hub.job is None and (hub.dry_run or hub.package is not None):
        raise ValueError("--dry-run and --package need --job")
    if hub.job is None and hub.push is None:
        script(rest)
        return
    from ..hub.jobs import push_result, run_job

    settings = parse_settings(settings_of(command), rest, f"hf-vit {command}")
    if not settings.output_dir:
        raise ValueError("--push and --job need --output-dir")
    if hub.job is None:
        script(rest)
        push_result(command, settings, str(hub.push))
    else:
        where = {"flavor": hub.job, "package": hub.package, "timeout": hub.timeout, "dry_run": hub.dry_run}
        run_job(command, rest, settings, result=hub.push, **where)


def settings_of(command: str) -> type[Any]:
    """Return the class of the settings of a command in the folder training/."""
    from ..settings import fields

    return getattr(fields, f"{command.capitalize()}Settings")


def plan(
    dataset: Annotated[str, "data set: a folder of images, or any other --dataset of finetune"],
    model: Annotated[
        str | None, "model to fine-tune (default: the largest AugReg model that finishes within --minutes)"
    ] = None,
    *,
    minutes: Annotated[float, "time limit of the run on this machine, in minutes", {"type": parse_positive}] = 30,
    image_size: Annotated[int | None, "image size to use, in pixels (default: chosen by the plan)", "PIXELS"] = None,
    eval_split: Annotated[str, "split to evaluate on, as in finetune", "SPLIT"] = "auto",
) -> None:
    """Propose settings for fine-tuning and explain each; `hf-vit finetune --recipe auto` uses them."""
    from ..training.planning import plan as make_plan

    silence_progress_bars()
    given = {"image_size": image_size, "eval_split": eval_split}
    given = {name: value for name, value in given.items() if value not in (None, "auto")}
    found = make_plan(dataset, model, minutes, **given)
    print(found.describe())
    settings = {"model": model, "dataset": dataset, "recipe": found.recipe, **given, **found.settings}
    options = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in settings.items()]
    print("hf-vit finetune", *options, "--output-dir out")


def recipes(action: _Action = None, name: Annotated[str | None, "name of a recipe"] = None) -> None:
    """List the recipes, or show one."""
    from ..settings.recipes import about_recipe, find_recipe, installed_recipes

    if action:
        _show(action, find_recipe(name) if name else None, "recipes")
        return
    for recipe, path in installed_recipes().items():
        what, hardware, expected = about_recipe(path)
        print(f"{recipe}\n    {what}\n    Hardware: {hardware}\n    Expect {expected}")


def launch_configs(action: _Action = None, name: Annotated[str | None, "name of a template"] = None) -> None:
    """List the launch templates (configuration files of Accelerate), or show one."""
    folder = Path(str(resources.files("hf_vit.scripts"))) / "accelerate"
    files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if action:
        if name:
            check_choice("launch template", name, files)
        _show(action, files[name] if name else None, "launch-configs")
        return
    for template, path in files.items():
        print(f"{template:12} {read_text(path).splitlines()[0].removeprefix('# ')}")


def _show(action: str, path: Path | None, command: str) -> None:
    if path is None:
        raise ValueError(f"{action} needs a name; `hf-vit {command}` lists them")
    print(path if action == "path" else read_text(path).rstrip())


def shard(
    source: Annotated[str, "data set: a folder of images, a Hub name, or any other --dataset of finetune"],
    output: Annotated[Path, "folder to write"],
    *,
    config: Annotated[str | None, "configuration of a Hub data set that has several"] = None,
    splits: Annotated[list[str], "splits to write (default: all)", "SPLIT"] = (),  # pyright: ignore[reportArgumentType]
    size: Annotated[
        int | None,
        "resize larger images to this shorter side, and store all images as JPEGs (default: copy the files)",
        "PIXELS",
    ] = None,
    quality: Annotated[int, "quality of the JPEGs with --size, 1 to 100"] = 95,
    images: Annotated[int, "images per shard"] = 10_000,
    layout: Annotated[
        Literal["class", "split/class"] | None, "what the folders at the top are, as in finetune (default: found)"
    ] = None,
    workers: Annotated[int, "number of processes (default: one per CPU)", {"type": parse_count}] = os.cpu_count() or 1,
) -> None:
    """Write a data set as shuffled WebDataset tar files with an index; run it again to resume after an interruption."""
    from ..data.shard_writing import ShardPlan, write_shards

    plan = ShardPlan(source, config, layout, size, quality, images)
    for split, count in write_shards(plan, output, list(splits), workers).items():
        print(f"{output}/{split}-*.tar: {count} images")
