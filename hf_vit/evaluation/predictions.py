"""Predictions of a model for a split: every sample counts exactly once, on any number of processes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from ..data.labels import state_classes
from ..data.loaders import EvalDataset, eval_loader
from ..data.sources import load_split
from ..data.splits import SKIPPED_IMAGES, Split, open_split
from ..training.settings import DataSettings, TrainingSettings
from .losses import cross_entropy, make_targets

Batch: TypeAlias = dict[str, torch.Tensor]
TOP_K = 5
PADDING = -1
_OF_PATCHES = ("pixel_attention_mask", "spatial_shapes", "kept_patches")


def open_named(settings: DataSettings, name: str, needs_labels: bool = True) -> Split:
    """Open the split of the settings' data set that has this name."""
    assert settings.dataset
    samples = load_split(settings.dataset, name, settings.dataset_config, settings.streaming)
    are_stated = settings.num_labels is not None or settings.label_names is not None
    together = settings.shuffle_buffer if isinstance(settings, TrainingSettings) else None
    columns = settings.image_column, settings.label_column
    split = open_split(samples, *columns, needs_labels, not are_stated, together)
    split.skipped_file = None if settings.output_dir is None else Path(settings.output_dir) / SKIPPED_IMAGES
    return state_classes(split, settings.num_labels, settings.label_names) if are_stated else split


def gather(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """Gather the rows of all processes, without those that only pad the last batch."""
    return cast(torch.Tensor, accelerator.gather_for_metrics(tensor))


def padded(loader: Iterable[Batch], empty: Batch) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the batches of a loader, padded to the length of `empty`, then `empty` forever; shapes never change.

    Args:
        empty: a batch of padding, with index -1.
    """
    for batch in loader:
        yield {name: torch.cat([tensor, empty[name][len(tensor) :]]) for name, tensor in batch.items()}
    while True:
        yield empty


def evaluation_batches(
    samples: EvalDataset, accelerator: Accelerator, batch_size: int, num_workers: int
) -> tuple[DataLoader, dict[str, torch.Tensor]]:
    """Return the evaluation batches of this process, and one batch of padding."""
    loader = eval_loader(samples, batch_size, accelerator.num_processes, accelerator.process_index, num_workers)
    empty = {name: torch.as_tensor(np.stack([value] * batch_size)) for name, value in samples.padding().items()}
    return loader, empty


def predict(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loader: Iterable[Batch],
    empty: Batch,
    loss: str = "softmax",
    **sizes: Any,
) -> dict[str, Any]:
    """Run a classifier on all samples of all processes.

    Args:
        sizes: additional arguments of the forward, such as `patch_size`.

    Returns:
        On every process, for all samples with a readable image, in the order of the data set: "ranked" (number, 5)
        class numbers, best first, their "probabilities", "label", "loss" and "index"; and "skipped", the number of
        unreadable images.

    Raises:
        ValueError: there are no samples, or no image can be read.
    """
    predictions = collect(accelerator, model, loader, empty, partial(_scores, model, loss=loss, sizes=sizes))
    if not len(predictions["index"]):
        raise ValueError(f"none of the {predictions['skipped']} images can be read")
    return predictions


@torch.no_grad()
def collect(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loader: Iterable[Batch],
    empty: Batch,
    compute: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> dict[str, Any]:
    """Run `compute` on all samples of all processes; return its results in the form of `predict`.

    Args:
        compute: batch -> named tensors, one row per sample; called under autocast, with `model` in evaluation mode.

    Raises:
        ValueError: there are no samples.
    """
    was_training = model.training
    model.eval()
    rows: list[dict[str, torch.Tensor]] = []
    for batch in padded(loader, empty):
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        index = gather(accelerator, batch["index"])
        if bool((index == PADDING).all()):
            break
        with accelerator.autocast():
            results = {**compute(batch), "label": batch["label"], "valid": batch["valid"]}
        gathered = {name: gather(accelerator, values) for name, values in results.items()}
        rows.append({name: tensor.cpu() for name, tensor in {**gathered, "index": index}.items()})
    model.train(was_training)
    return _tidy({name: torch.cat([row[name] for row in rows]).numpy() for name in rows[0]} if rows else {})


def _scores(model: torch.nn.Module, batch: dict[str, torch.Tensor], loss: str, sizes: dict) -> dict[str, torch.Tensor]:
    """Best classes and loss of each sample of one batch."""
    logits = model(**model_inputs(batch), **sizes).logits.float()
    targets = make_targets(batch["label"].clamp(min=0), logits.shape[1])
    ranked = logits.topk(min(TOP_K, logits.shape[1])).indices
    best = (logits.sigmoid() if loss == "sigmoid" else logits.softmax(dim=1)).gather(1, ranked)
    return {"ranked": ranked, "probabilities": best, "loss": cross_entropy(logits, targets, loss)}


def model_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the arguments of a model's forward for a batch; for images as patches, also their grids and masks."""
    patches = {name: batch[name] for name in _OF_PATCHES if name in batch}
    return {"pixel_values": batch["image"], **patches}


def _tidy(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """Drop padding and unreadable images, and sort the rest in the order of the data set."""
    if not columns:
        raise ValueError("the evaluation split is empty")
    real = columns["index"] >= 0
    good = real & columns["valid"].astype(bool)
    order = np.argsort(columns["index"][good], kind="stable")
    kept = {name: values[good][order] for name, values in columns.items() if name != "valid"}
    return {**kept, "skipped": int(real.sum() - good.sum())}


def score_classes(predictions: dict[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Return the accuracy of each class with images as "accuracy/NAME"; nothing if images may have several labels.

    Args:
        predictions: the result of `predict`.
        names: unique class names, by number.
    """
    labels = predictions["label"]
    if labels.ndim == 2:
        return {}
    right = predictions["ranked"][:, 0] == labels
    return {f"accuracy/{names[n]}": float(right[labels == n].mean()) for n in np.unique(labels[labels >= 0])}


def score(predictions: dict[str, Any], real_labels: list[list[int]] | None = None) -> dict[str, float | int]:
    """Return the metrics of `predict`'s result; see `hf_vit.evaluation.metrics`.

    With `real_labels`, images may have no label of their own; then there are no metrics of such labels.

    Raises:
        ValueError: images have no label.
    """
    from .metrics import MeanPerClassAccuracy, RealAccuracy, TopKAccuracy  # here: importing evaluate takes seconds

    ranked, labels, results = predictions["ranked"], predictions["label"], {}
    if missing := int((labels < 0).sum()):
        if real_labels is None:
            raise ValueError(f"{missing} of {len(labels)} images have no label; choose another split")
    else:
        results["loss"] = float(predictions["loss"].mean())
        if labels.ndim == 2:  # several labels: the first prediction must be one of them
            results["accuracy"] = float(labels[np.arange(len(labels)), ranked[:, 0]].mean())
        else:
            results |= TopKAccuracy().compute(predictions=ranked, references=labels) or {}
            results |= MeanPerClassAccuracy().compute(predictions=ranked, references=labels) or {}
    if real_labels is not None:
        chosen = [real_labels[index] for index in predictions["index"]]
        results |= RealAccuracy().compute(predictions=ranked, references=chosen) or {}
    return {**results, "samples": len(labels), "skipped": predictions["skipped"]}
