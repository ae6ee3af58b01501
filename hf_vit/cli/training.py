"""`hf-vit finetune`, `pretrain`, `evaluate`, `audit`, `soup`, `plan`, `recipes`, `launch-configs` and `shard`."""

import json
import logging
import os
import shlex
import sys
import time
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from ..files.json_files import read_text
from ..files.messages import FAILED, USER_ERRORS, check_choice, silence_progress_bars
from ..files.output import refuse_existing
from ..settings.parser import check_order
from .arguments import Overwrite, parse_count, parse_positive

_LAUNCHER_SECONDS = 10  # within which a launcher ends the other processes after the main one has failed
_Action = Annotated[Literal["show", "path"] | None, "print the file, or its path"]


def run_training(command: str, argv: list[str]) -> Any:
    """Run `hf-vit finetune`, `pretrain`, `evaluate` or `audit`, here or as a job, and push its result if requested.

    The settings are declared in hf_vit/settings/fields.py, and set by recipes and the command line.

    Returns:
        The metrics, or the issues of an audit.

    Raises:
        ValueError, OSError, ImportError: mistakes of the user, also if the loss is not finite or memory ran out.
        SystemExit: after a signal, with status 75 once a checkpoint was saved.
    """
    try:
        return _run(command, argv)
    except USER_ERRORS:
        _let_the_main_process_speak()
        raise


def _let_the_main_process_speak() -> None:
    """Wait in another process, since the main one usually has the same error, prints it, and ends all."""
    if int(os.environ.get("RANK") or 0):
        time.sleep(_LAUNCHER_SECONDS)


def _run(command: str, argv: list[str]) -> Any:
    from ..settings.fields import HubOptions
    from ..settings.options import parse_settings, parse_some
    from ..settings.recipes import show

    hub, options = parse_some(HubOptions, argv)
    program = f"hf-vit {command}"
    settings = parse_settings(settings_of(command), options, program, _plan if command == "finetune" else None)
    if settings.print_config:
        return show(settings)
    if hub.job is None:
        result = _run_here(command, settings, shlex.join(["hf-vit", command, *options]))
        if hub.push is not None:
            from ..hub.jobs import push_result

            push_result(command, settings, hub.push)
        return result
    from ..hub.jobs import run_job

    where = {"flavor": hub.job, "package": hub.package, "timeout": hub.timeout, "dry_run": hub.dry_run}
    return run_job(command, options, settings, result=hub.push, **where)


def settings_of(command: str) -> type[Any]:
    """Return the class of the settings of a command."""
    from ..settings import fields

    return getattr(fields, f"{command.capitalize()}Settings")


def _plan(values: dict[str, Any]) -> dict[str, Any]:
    from ..training.planning import plan_recipe  # imports torch, which other recipes do not need yet

    return plan_recipe(values)


def _run_here(command: str, settings: Any, text: str) -> Any:
    """Run a command in this process, one of those that Accelerate's launcher started; `text` is its command line."""
    from accelerate import PartialState
    from huggingface_hub.utils.logging import disable_propagation

    from ..training.launch import keep_freed_memory
    from ..training.preemption import Preempted
    from ..training.trainer import ProcessStalled, TrainingStopped

    scripts = Path(str(resources.files("hf_vit.scripts")))
    if sys.path and Path(sys.path[0]).resolve() == scripts.resolve():
        sys.path.pop(0)  # of a script that was started by its path: evaluate.py there would hide the package evaluate
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    disable_propagation()  # huggingface_hub prints its messages itself
    keep_freed_memory()
    silence_progress_bars()
    run = {"finetune": _finetune, "pretrain": _pretrain, "evaluate": _evaluate, "audit": _audit}[command]
    try:
        return run(settings, text)
    except ProcessStalled as error:
        _let_the_main_process_speak()
        print(f"hf-vit {command}: {error}", file=sys.stderr, flush=True)
        os._exit(FAILED)  # threads still wait for the stalled process
    except TrainingStopped as error:
        raise ValueError(str(error)) from error
    except Preempted as preempted:
        processes = PartialState()
        if processes.is_main_process:
            print(preempted, file=sys.stderr)
        processes.destroy_process_group()
        raise SystemExit(preempted.status) from None


def _finetune(settings: Any, text: str) -> dict[str, Any]:
    from ..training.api import run_finetuning

    return run_finetuning(settings, text)


def _pretrain(settings: Any, text: str) -> dict[str, Any]:
    from ..training.api import run_pretraining

    return run_pretraining(settings, text)


def _evaluate(settings: Any, text: str) -> dict[str, Any]:
    """Evaluate a model; print the metrics as JSON on standard output, and as a table on standard error."""
    from accelerate import PartialState

    from ..evaluation.protocols import run_protocol, summarize

    metrics = run_protocol(settings)
    processes = PartialState()
    if processes.is_main_process:
        print(json.dumps(metrics, indent=2))
        print(summarize(metrics), file=sys.stderr)
    processes.destroy_process_group()
    return metrics


def _audit(settings: Any, text: str) -> list[Any]:
    """Audit a dataset; print the number of issues of each kind."""
    from accelerate import PartialState

    from ..auditing.audit import run_audit
    from ..training.launch import start_accelerator

    issues = run_audit(settings, start_accelerator(settings))
    processes = PartialState()
    if processes.is_main_process:
        for kind, count in Counter(issue.issue for issue in issues).items():
            print(f"{kind:16} {count:6,}")
        if settings.output_dir:
            output = Path(settings.output_dir)
            table = output / "issues.csv"
            command = f"hf-vit finetune --exclude {shlex.quote(str(table))} ..."
            print(f"open {output / 'audit.html'}, edit {table}, then run: {command}")
    processes.destroy_process_group()
    return issues


def plan(
    words: Annotated[
        list[str],
        "the model to fine-tune (default: the largest AugReg model that finishes within --minutes), and the dataset: "
        "a folder of images, or any other data of finetune",
        {"nargs": "+", "metavar": "[MODEL] DATA"},
    ],
    *,
    minutes: Annotated[float, "time limit of the run on this machine, in minutes", {"type": parse_positive}] = 30,
    image_size: Annotated[int | None, "image size to use, in pixels (default: chosen by the plan)", "PIXELS"] = None,
    eval_split: Annotated[str, "split to evaluate on, as in finetune", "SPLIT"] = "auto",
) -> None:
    """Propose settings for fine-tuning and explain each; `hf-vit finetune --recipe auto` uses them."""
    if len(words) > 2:
        raise ValueError(f"{words[2]} is one word too many: hf-vit plan [MODEL] DATA")
    dataset = words[-1]
    model = words[0] if len(words) == 2 else None
    if model is not None:
        check_order("hf-vit plan", model, dataset)
    from ..training.planning import plan as make_plan

    silence_progress_bars()
    given = {"image_size": image_size, "eval_split": eval_split}
    given = {name: value for name, value in given.items() if value not in (None, "auto")}
    found = make_plan(dataset, model, minutes, **given)
    print(found.describe())
    settings = {"recipe": found.recipe, **given, **found.settings}
    chosen = model or settings.pop("model")
    options = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in settings.items()]
    print("hf-vit finetune", shlex.quote(chosen), shlex.quote(dataset), "out", *options)


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
    source: Annotated[str, "dataset: a folder of images, a Hub name, or any other --dataset of finetune"],
    output: Annotated[Path, "folder to write"],
    *,
    config: Annotated[str | None, "configuration of a Hub dataset that has several"] = None,
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
    """Write a dataset as shuffled WebDataset tar files with an index; run it again to resume after an interruption."""
    from ..data.shard_writing import ShardPlan, write_shards

    plan = ShardPlan(source, config, layout, size, quality, images)
    for split, count in write_shards(plan, output, list(splits), workers).items():
        print(f"{output}/{split}-*.tar: {count} images")


def soup(
    runs: Annotated[list[str], "fine-tuned models: folders or names on the Hub", "RUN"],
    *,
    dataset: Annotated[
        str | None, "dataset with images that no run was trained on, as in `hf-vit evaluate`; needed for greedy"
    ] = None,
    split: Annotated[
        str | None, "split of it (default: test, else the images that the training of the first run held out)"
    ] = None,
    method: Annotated[
        Literal["greedy", "uniform"],
        "greedy: take the runs by falling accuracy, and keep each one with which the accuracy of the mean does not "
        "fall; uniform: the mean of all runs",
    ] = "greedy",
    output: Annotated[Path, "folder to write", "FOLDER"],
    overwrite: Overwrite = False,
) -> None:
    """Average the weights of fine-tuned models into one model ("Model soups", arXiv 2203.05482)."""
    refuse_existing(output, overwrite)
    silence_progress_bars()
    from ..evaluation.soups import soup

    record = soup(runs, dataset, output, method, split, overwrite)
    for member in record["members"]:
        print(f"{_describe_metrics(member)}{member['model']}{'' if member['used'] else ' (not used)'}")
    print(f"{_describe_metrics(record['soup'])}{output}, the mean of {sum(one['used'] for one in record['members'])}")
    used = [member["model"] for member in record["members"] if member["used"]]
    if len(used) == 1:
        print(f"no mean is better: the soup is the best single model, {used[0]}")


def _describe_metrics(metrics: dict[str, Any]) -> str:
    """Return the accuracy of a model with its interval, or the mean average precision; "" without metrics."""
    if "accuracy" in metrics:
        low, high = metrics["accuracy_interval"]
        return f"{metrics['accuracy']:.2%} ({low:.1%} to {high:.1%})  "
    return f"{metrics['mean_average_precision']:.2%}  " if "mean_average_precision" in metrics else ""
