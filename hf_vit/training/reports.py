"""Reports of a run: picture of the first batch, learning curve, data for the model card, and evaluation page."""

import datetime
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType
from PIL import Image, ImageDraw, ImageOps

from ..data.devices import describe_device
from ..data.labels import distinguish, names_of
from ..files.output import own_file, write_json
from ..files.pages import page_color
from ..files.runs import is_error
from ..files.versions import versions_of
from ..inference.result_page import Explanation, HeldOut, title_of, write_card_results, write_results
from ..models.scores import thresholds_of
from ..models.sizes import as_pair
from ..settings.fields import AUTO, TrainingSettings, fields_with
from ..settings.recipes import dump
from .objectives import Objective, Regression
from .run import Run, TrainState

_FIGURES = ("confusion_matrix.png", "scatter.png", "learning_curve.png")  # of the model card
# Launches in which the main process has all weights.
_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_PACKAGES = ("hf_vit", "torch", "transformers", "accelerate", "datasets")
_DRAWN = 36  # images of train_batch.png
_TILE, _GAP = 144, 8  # pixels of an image, and between two
_LONGEST = 24  # characters of a caption


def explanation_of(run: Run, model: Any, processor: Any) -> Explanation | None:
    """Return what draws the mistakes of a classifier; None if the main process does not have all weights."""
    is_whole = run.accelerator.distributed_type in _WHOLE
    return Explanation(run.accelerator.unwrap_model(model), processor) if is_whole else None


def write_run_reports(
    run: Run,
    state: TrainState,
    predictions: Mapping[str, Any],
    metrics: Mapping[str, Any],
    explain: Explanation | None = None,
) -> None:
    """Write card_data.json, the learning curve if there are steps, and the reports of the last evaluation.

    Args:
        predictions: result of `predict` on the evaluation split; empty without a classifier.
        explain: see `HeldOut`.
    """
    output, details, held_out = run.output, card_data(run, metrics), None
    curve = None
    if run.num_steps:
        curve = output / "learning_curve.png"
        write_curve(state.history, curve)
    if run.eval_split is not None and predictions:
        folder = Path(str(run.settings.dataset))
        names, thresholds = names_of(run.config), thresholds_of(run.config)
        held_out = HeldOut(predictions, run.eval_split, names, folder, thresholds, explain)
        details |= write_card_results(output, held_out)
    details["figures"] = [name for name in _FIGURES if (output / name).is_file()]
    write_json(output / "card_data.json", details)
    if held_out is not None:
        title = title_of(details["base_model"] or "a new model", run.settings.dataset)
        about = title, _describe_run(run, state.step, details), dump(run.settings)
        audit = "audit/audit.html" if getattr(run.settings, "audit", False) else ""
        write_results(output, held_out, *about, curve=curve, audit=audit)


def card_data(run: Run, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a run's model card: command, dataset, settings that affect it, metrics, device, versions."""
    settings = run.settings
    unused = {*fields_with("free_on_resume", settings), *settings.unused_fields()}
    return {
        **({"command": run.command} if run.command else {}),
        "date": datetime.date.today().isoformat(),
        "base_model": getattr(settings, "model", None),
        "dataset": settings.dataset,
        "train_split": settings.train_split,
        "eval_split": settings.eval_split,
        "fingerprint": run.fingerprint["data"],
        "settings": {name: value for name, value in vars(settings).items() if name not in unused},
        "metrics": {name: value for name, value in metrics.items() if "/" not in name},  # without the metrics per class
        "processes": run.accelerator.num_processes,
        "device": describe_device(run.accelerator.device),
        "versions": versions_of(_PACKAGES),
    }


def _describe_run(run: Run, step: int, details: Mapping[str, Any]) -> dict[str, str]:
    settings, metrics = run.settings, details["metrics"]
    speed = f"{metrics['train_images_per_second']:,.1f} images per second"
    if run.num_steps:
        steps = f"{step:,} of {run.num_steps:,} optimizer steps"
        length = {"best": describe_best(metrics), "length": f"{steps} of {settings.batch_size:,} images"}
        speed += ", including evaluations and checkpoints"
    else:
        length = {"head": f"in closed form, from {metrics['train_images']:,} images; l2_reg {metrics['l2_reg']:g}"}
    return {
        "dataset": str(settings.dataset),
        "trained from": details["base_model"] or "random weights",
        "held out": held_out_of(settings),
        **length,
        "throughput": speed,
        "device": f"{details['device']} (processes: {details['processes']})",
        "date": details["date"],
        **({"command": details["command"]} if "command" in details else {}),
    }


def held_out_of(settings: TrainingSettings) -> str:
    """Describe the images for evaluation, as in the settings."""
    if settings.eval_split != AUTO:
        return str(settings.eval_split)
    share = "a tenth" if settings.eval_fraction == 0.1 else f"{settings.eval_fraction:.3g}"
    return f"{share} of the training images"


def describe_best(metrics: Mapping[str, Any]) -> str:
    """Describe the result of `Trainer.best_evaluation`, as "accuracy 91.20% after step 300, in best/"."""
    name, value = metrics["best_metric"], metrics["best"]
    if value is None:
        return "none"
    is_share = not is_error(name) and name.partition("/")[0] not in ("r2", "spearman")
    shown = f"{value:.2%}" if is_share else f"{value:.4g}"
    return f"{name.replace('_', ' ')} {shown} after step {metrics['best_step']:,}, in best/"


def write_curve(history: list[dict], path: Path) -> None:
    """Draw the learning curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    colors = {"": page_color("soft"), "eval_": page_color("bar")}  # as in report.html
    measure = "mae" if any("mae" in entry for entry in history) else "accuracy"
    for axes, name in zip(figure.subplots(1, 3), ("loss", measure, "learning_rate"), strict=True):
        for prefix, color in colors.items():
            key = f"{prefix}{name}"
            if points := [(entry["step"], entry[key]) for entry in history if key in entry]:
                label = "held out" if prefix else "training"
                axes.plot(*zip(*points, strict=True), label=label, color=color, marker=".")
        axes.set_ylim(bottom=min(0, axes.dataLim.y0))
        axes.set_title(name.replace("_", " "))
        axes.set_xlabel("optimizer step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=page_color("line"))
        if len(axes.lines) > 1:
            axes.legend()
    with own_file(path) as file:
        figure.savefig(file, dpi=120)


def draw_batch(run: Run, objective: Objective, batch: dict[str, torch.Tensor], patch_size: Any) -> None:
    """Draw the first images of the first batch, as the model sees them, with their labels: train_batch.png.

    Args:
        patch_size: of the image processor, for batches of patches.
    """
    rng = np.random.default_rng((run.settings.seed, 0))  # as in `Trainer.train_step`
    pixels, targets = objective.prepare(batch, rng)
    pixels, captions = objective.normalizer.inverse(pixels[:_DRAWN]).cpu(), [""] * _DRAWN
    if isinstance(objective, Regression):
        captions = [", ".join(f"{value:.4g}" for value in values) for values in batch["label"][:_DRAWN].tolist()]
    elif targets is not None:
        names = distinguish(names_of(run.config))
        captions = [describe_target(target, names) for target in targets[:_DRAWN].cpu().numpy()]
    if "spatial_shapes" in batch:
        kept, size = batch.get("keep", [None] * _DRAWN), as_pair(patch_size)
        rows = zip(pixels.numpy(), batch["spatial_shapes"].tolist(), kept, strict=False)
        images = [join_patches(patches, grid, size, chosen) for patches, grid, chosen in rows]
    else:
        images = list(pixels.permute(0, 2, 3, 1).numpy())
    write_batch(images, captions[: len(images)], run.output / "train_batch.png")


def describe_target(target: np.ndarray, names: Sequence[str]) -> str:
    """Describe the target (num_labels,) of an image, as "cat", or "cat 0.83, dog 0.17" if two are mixed."""
    chosen = [int(number) for number in np.argsort(-target, kind="stable")[:3] if target[number] >= 0.1]
    if len(chosen) == 1:
        return names[chosen[0]]
    return ", ".join(f"{names[number]} {target[number]:.2g}" for number in chosen)


def join_patches(patches: np.ndarray, grid: Sequence[int], size: tuple[int, int], kept: Any = None) -> np.ndarray:
    """Reassemble an image from its patches; dropped patches are gray.

    Args:
        patches: (patches, patch height * patch width * channels) uint8, padded.
        grid: rows and columns of patches.
        size: height and width of a patch.
        kept: numbers of the patches that are not dropped, padded with -1; None: no patch is dropped.

    Returns:
        (height, width, channels)
    """
    patches = patches[: grid[0] * grid[1]].copy()
    if kept is not None:
        patches[np.setdiff1d(np.arange(len(patches)), kept.cpu().numpy())] = 128
    image = patches.reshape(*grid, *size, -1).swapaxes(1, 2)
    return image.reshape(grid[0] * size[0], grid[1] * size[1], -1)


def write_batch(images: Sequence[np.ndarray], captions: Sequence[str], path: Path) -> None:
    """Draw images of a batch as a grid, each with its caption.

    Args:
        images: each (height, width, channels) uint8; the first 3 channels are drawn, or the first if there are fewer.
    """
    columns, width = math.ceil(math.sqrt(len(images))), _TILE + _GAP
    rows, height = math.ceil(len(images) / columns), _TILE + _GAP + 16
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(number, columns)
        left, top = column * width + _GAP, row * height + _GAP
        image = Image.fromarray(pixels[..., :3] if pixels.shape[2] >= 3 else pixels[..., 0])
        sheet.paste(ImageOps.contain(image, (_TILE, _TILE), Image.Resampling.BOX), (left, top))
        draw.text((left, top + _TILE + 2), caption[:_LONGEST], "black")
    with own_file(path) as file:
        sheet.save(file, "PNG")
