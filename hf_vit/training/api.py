"""`hf_vit.finetune` and `hf_vit.pretrain`: training from Python; the scripts of `training/` start the same runs."""

import atexit
import os
import statistics
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..conversion.transformers import save_for_transformers
from ..data.splits import Split, open_splits, split_into_folds
from ..files.output import new_model_files, write_json
from ..loading import check_name, load
from ..settings.fields import AUTO, AuditSettings, DataSettings, FinetuneSettings, PretrainSettings
from ..settings.recipes import build_settings
from .build import build_for_pretraining, load_for_finetuning
from .closed_form import ClosedFormRun
from .console import print_plan, print_results
from .launch import start_accelerator
from .planning import plan_recipe
from .trackers import choose_trackers
from .trainer import Trainer

PathLike = str | os.PathLike[str]


def finetune(
    model: PathLike,
    dataset: PathLike | None,
    output_dir: PathLike | None = None,
    recipe: PathLike | None = None,
    select: dict[str, str] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Fine-tune a model for image classification, as `hf-vit finetune` does.

    Args:
        model: a folder, a name on the Hub, a checkpoint file, or a released checkpoint such as "augreg:Ti/16".
        dataset: a folder with a folder of images for each class, a name on the Hub, or parquet or tar files; None with
            `add` or `remove`.
        output_dir: folder of the result: the model, its metrics and reports, `best/` and the checkpoints; None: the
            first of runs/1, runs/2, ... that does not exist.
        recipe: recipe to start from, such as "finetune_small"; see `hf-vit recipes`. "auto" uses the settings that
            `hf_vit.plan` proposes; it is the default without `steps` and `epochs`. "instant" solves for the head in
            closed form.
        select: group -> level of the recipe's options, such as `{"dataset": "pets"}` for "finetune_table4".
        settings: fields of `FinetuneSettings`, which override the recipe: `epochs=5`, `learning_rate=0.01`,
            `image_size=384`. `hf-vit finetune --help all` explains each.

    Returns:
        The metrics on the held-out images, as in metrics.json: "accuracy", "loss" and "samples", "best" with
        "best_metric" and "best_step", "train_seconds", ... Without held-out images, there are only the "train_..."
        metrics, and "best" is None. A head in closed form also has "l2_reg" and "leave_one_out_accuracy". With `folds`,
        the metrics of all "folds", their "mean" and their "deviation".

    Raises:
        ValueError: a setting is unknown or wrong, or does not fit the model or the data.
        TrainingStopped: the loss is not finite, or memory ran out.

    Example:
        >>> metrics = hf_vit.finetune("ti16", "photographs", "out", recipe="finetune_small", epochs=2)
        >>> metrics["accuracy"]
    """
    check_name(model)
    own = {"model": str(model), "dataset": None if dataset is None else str(dataset)}
    if output_dir is not None:
        own["output_dir"] = str(output_dir)
    command = _python_call("finetune", *own.values(), recipe=recipe, select=select, **settings)
    resolved = build_settings(FinetuneSettings, {**settings, **own}, recipe, select, plan_recipe)
    return run_finetuning(resolved, command)


def pretrain(
    dataset: PathLike,
    output_dir: PathLike | None = None,
    recipe: PathLike | None = None,
    select: dict[str, str] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a model from random weights, with labels or by masked patch prediction, as `hf-vit pretrain` does.

    Args:
        dataset, output_dir, recipe, select: as in `finetune`; "digits" is a dataset that needs no download.
        settings: fields of `PretrainSettings`, among them `variant="S/16"` or `config={...}`.

    Returns:
        The metrics, as in `finetune`; for masked patch prediction "loss" and "patch_accuracy".

    Raises:
        ValueError, TrainingStopped: as in `finetune`.

    Example:
        >>> metrics = hf_vit.pretrain("digits", "out", recipe="digits", steps=20, warmup_steps=2)
    """
    own = {"dataset": str(dataset)}
    if output_dir is not None:
        own["output_dir"] = str(output_dir)
    command = _python_call("pretrain", *own.values(), recipe=recipe, select=select, **settings)
    return run_pretraining(build_settings(PretrainSettings, {**settings, **own}, recipe, select), command)


def _python_call(function: str, *positional: str | None, recipe: PathLike | None, **settings: Any) -> str:
    """Return the Python call that starts a run, for its model card."""
    named = {name: value for name, value in settings.items() if value or name not in ("recipe", "select")}
    texts = {name: repr(os.fspath(x) if isinstance(x, os.PathLike) else x) for name, x in named.items()}
    return f"hf_vit.{function}({', '.join([*map(repr, positional), *(f'{name}={x}' for name, x in texts.items())])})"


def run_finetuning(settings: FinetuneSettings, command: str) -> dict[str, Any]:
    """Fine-tune a model; return the metrics, which are also saved in `output_dir`; the model card shows `command`."""
    choose_trackers(settings.report_to)  # before any work
    accelerator = start_accelerator(settings)  # processes, device and precision of `accelerate launch`
    output = Path(str(settings.output_dir))
    if settings.folds is not None:
        metrics = cross_validate(settings, accelerator, command)
    else:
        splits: tuple[Split | None, Split | None] = (None, None)
        if settings.dataset:  # for training and evaluation, with the same class indices; not for `remove` alone
            splits = open_splits(settings, two_classes=settings.add is None)
        metrics = _finetune(settings, accelerator, splits[0], splits, command)
    if settings.audit:
        shared = {field.name: getattr(settings, field.name) for field in fields(DataSettings)}
        own = {"model": settings.model, "output_dir": str(output / "audit"), "overwrite": True}
        names = [name for name in (settings.train_split, settings.eval_split) if name not in (None, AUTO)]
        from ..auditing.audit import run_audit  # the leaf, only when a run asks for it

        run_audit(AuditSettings(**shared | own, splits=names), accelerator)
    accelerator.wait_for_everyone()
    return metrics


def _finetune(
    settings: FinetuneSettings,
    accelerator: Accelerator,
    split: Split | None,
    splits: tuple[Split | None, Split | None],
    command: str,
) -> dict[str, Any]:
    """Fine-tune one model on the first of two splits, and evaluate it on the second; `split` is all training images."""
    if settings.closed_form:
        run = ClosedFormRun(settings, accelerator, *splits, command)
        metrics = run.fit()
        print_results(run.run, metrics)
    else:
        train, held_out = splits
        assert split is not None
        assert train is not None
        model, processor = load_for_finetuning(settings, split)  # pretrained weights and a new head of zeros
        metrics = _fit(Trainer(settings, accelerator, model, processor, train, held_out, command))
    output = Path(str(settings.output_dir))
    if settings.save_for == "transformers" and accelerator.is_main_process:
        for folder in (output, output / "best"):
            if (folder / "config.json").is_file():
                rewrite_for_transformers(folder)
    return metrics


def rewrite_for_transformers(folder: Path) -> None:
    """Rewrite a folder of `save_pretrained` as one of transformers' own classes; its other files stay."""
    model, processor = load(folder, backend="eager")
    with new_model_files(folder) as draft:
        save_for_transformers(model, processor, draft)


def cross_validate(settings: FinetuneSettings, accelerator: Accelerator, command: str) -> dict[str, Any]:
    """Fine-tune one model per fold on the training images of the other folds, and evaluate it on its own fold.

    Returns:
        As in folds.json: "folds", a list with the metrics of each, and their "mean" and "deviation" (the sample
        standard deviation).
    """
    whole = replace(settings, eval_split=None)
    split, _ = open_splits(whole)
    output = Path(str(settings.output_dir))
    found: list[dict[str, Any]] = []
    for number, parts in enumerate(split_into_folds(split, int(settings.folds or 0)), start=1):
        fold = f"fold {number} of {settings.folds}"
        own = replace(whole, audit=False, eval_split=fold, output_dir=str(output / f"fold_{number}"))
        if own.tracker_name is not None:
            own.tracker_name += f" {fold}"
        accelerator.print(fold)
        found.append(_finetune(own, accelerator, split, parts, command))
        accelerator.free_memory()
    rows = {name: [metrics[name] for metrics in found] for name in _common_metrics(found)}
    mean = {name: statistics.fmean(values) for name, values in rows.items()}
    deviation = {name: statistics.stdev(values) for name, values in rows.items()}
    results = {"folds": found, "mean": mean, "deviation": deviation}
    if accelerator.is_main_process:
        write_json(output / "folds.json", results)
    shown = "mean_average_precision" if split.multi_label else "accuracy"
    form = ".2%"
    if split.targets:
        shown = next(name for name in rows if name.startswith("mae"))
        form = ".4g"
    accelerator.print(
        f"{shown.replace('_', ' ')} {mean[shown]:{form}}, standard deviation {deviation[shown]:{form}} over "
        f"{len(found)} folds: {output / 'folds.json'}"
    )
    return results


def _common_metrics(found: list[dict[str, Any]]) -> list[str]:
    """Return the names of the metrics of the evaluation that all folds have, without intervals."""
    names = []
    for name, value in found[0].items():
        is_number = value is not None and not isinstance(value, list)
        if is_number and not name.startswith(("train_", "best")) and all(name in metrics for metrics in found):
            names.append(name)
    return names


def run_pretraining(settings: PretrainSettings, command: str) -> dict[str, Any]:
    """Train a model; return the metrics, which are also saved in `output_dir`; the model card shows `command`."""
    choose_trackers(settings.report_to)
    accelerator = start_accelerator(settings)
    split, eval_split = open_splits(settings, needs_labels=settings.objective == "supervised")
    model, processor = build_for_pretraining(settings, split)  # `variant` and `config`, with random weights
    return _fit(Trainer(settings, accelerator, model, processor, split, eval_split, command))


def _fit(trainer: Trainer) -> dict[str, Any]:
    print_plan(trainer.run, trainer.parameters.values(), trainer.augmentation is not None)
    metrics = trainer.fit()
    print_results(trainer.run, metrics)
    for tracker in trainer.accelerator.trackers:
        tracker.finish()  # Accelerate's `end_training` would end the process group, too
    atexit.register(trainer.accelerator.state.destroy_process_group)  # not now: the program may train again
    return metrics
