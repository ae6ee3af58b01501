"""Messages at the start and the end of a run: its plan and its results."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel

from ..data.splits import Split
from ..loading import find_better
from ..models.configuration_hf_vit import as_pair
from .assembly import count_steps
from .devices import describe_device
from .run import in_words
from .settings import AUTO, TrainingSettings

_LISTED = 4  # number of class names to list


def announce(
    settings: TrainingSettings, accelerator: Accelerator, model: PreTrainedModel, split: Split, eval_split: Split | None
) -> None:
    """Print the plan of a run: model, data, length, device and output folder."""
    for name, text in _plan(settings, accelerator, model, split, eval_split):
        accelerator.print(f"{name:10}{text}")


def _plan(
    settings: TrainingSettings, accelerator: Accelerator, model: Any, split: Split, eval_split: Split | None
) -> Iterator[tuple[str, str]]:
    weights = getattr(settings, "model", None) or "random weights"
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    height, width = as_pair(model.config.image_size)
    size = f"{height} x {width} pixels"
    if settings.preset == "native":
        size = f"at most {math.prod(model.config.grid_size)} patches an image, aspect ratios kept"
    share = "" if trained == model.num_parameters() else f", of which {trained:,} train"
    yield "model", f"{weights}: {model.num_parameters():,} parameters{share}, {size}"
    yield "train", f"{settings.dataset}, {settings.train_split}: {_describe(split)}"
    yield "evaluate", _describe_evaluation(settings, eval_split)
    steps = count_steps(settings, split)
    epochs = steps * settings.batch_size / max(len(split), 1)
    yield "length", f"{steps:,} optimiser steps of {settings.batch_size:,} images ({epochs:.3g} epochs)"
    processes = f", {accelerator.num_processes} processes" if accelerator.num_processes > 1 else ""
    precision = {"no": "float32"}.get(accelerator.mixed_precision, f"{accelerator.mixed_precision} autocast")
    yield "device", f"{describe_device(accelerator.device)}, {precision}{processes}"
    yield "result", str(settings.output_dir)


def _describe(split: Split) -> str:
    """Summary of a split: `244 images of 2 classes (ants, bees)`."""
    images = f"{len(split):,} images"
    if split.label_column is None:
        return images
    names = split.label_names or []
    listed = f" ({', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''})" if names else ""
    return f"{images} of {split.num_labels:,} classes{listed}"


def _describe_evaluation(settings: TrainingSettings, split: Split | None) -> str:
    if split is None:
        return "nothing; set --eval-split"
    if settings.eval_split == AUTO:
        return f"{len(split):,} of the training images, a tenth of each class, which are not trained on"
    return f"{settings.dataset}, {settings.eval_split}: {len(split):,} images"


def conclude(settings: TrainingSettings, accelerator: Accelerator, metrics: dict[str, Any]) -> None:
    """Print the results of a run, where they are saved, and the next commands to try."""
    output = settings.output_dir
    if "accuracy" in metrics:
        best = f"; best {in_words(metrics)}, in {Path(str(output), 'best')}" if metrics["best"] is not None else ""
        accelerator.print(f"accuracy {metrics['accuracy']:.2%} on {metrics['samples']:,} held-out images{best}")
    if Path(str(output), "report.html").exists():
        accelerator.print(f"mistakes are shown in {Path(str(output), 'report.html')}")
    has_classes = getattr(settings, "objective", "supervised") == "supervised"
    model = find_better(str(output)) or output
    use = f"predict {model} IMAGE" if has_classes else f"finetune --model {model} --dataset FOLDER"
    accelerator.print(f"saved in {output}; try: hf-vit {use}, or hf-vit push {model} NAME")
