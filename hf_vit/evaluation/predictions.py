"""Predictions of a model for a split: every sample counts exactly once, on any number of processes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from ..data.loaders import EvalDataset, eval_loader
from ..data.splits import Split
from ..devices import on_cpu
from ..models.configuration_hf_vit import as_pair
from ..models.image_processing_hf_vit import scale_and_offset
from ..settings.fields import DataSettings

Batch: TypeAlias = dict[str, torch.Tensor]
TOP_K = 5
_ROWS = 2**14  # of a column that processes exchange at once
_PATCH_INPUTS = ("pixel_attention_mask", "spatial_shapes", "kept_patches")


class EvaluationBatches:
    """Evaluation batches of this process, all of one length, then batches of padding (index -1) forever.

    Args:
        config: the model's configuration.
    """

    def __init__(self, settings: DataSettings, split: Split, processor: Any, config: Any, accelerator: Accelerator):
        samples = EvalDataset(split, processor, as_pair(config.image_size), config.num_channels)
        processes, size = (accelerator.num_processes, accelerator.process_index), settings.eval_batch_size
        self.loader: Any = eval_loader(samples, size, *processes, settings.num_workers)
        self.padding = {name: torch.as_tensor(np.stack([value] * size)) for name, value in samples.padding().items()}
        self.device = accelerator.device
        self.normalization = None  # of images that come as uint8
        if samples.has_levels:
            factor, mean, std = processor.rescale_factor, processor.image_mean, processor.image_std
            self.normalization = scale_and_offset(factor, mean, std, self.device)

    def __iter__(self) -> Iterator[Batch]:
        size = len(self.padding["index"])
        for batch in self.loader:
            if (length := len(batch["index"])) < size:
                batch = {name: torch.cat([tensor, self.padding[name][length:]]) for name, tensor in batch.items()}
            yield batch
        while True:
            yield self.padding

    def on_device(self, batch: Batch) -> Batch:
        """Return a batch on the device, with normalized images."""
        batch = to_device(batch, self.device)
        if self.normalization is not None:
            scale, offset = self.normalization
            batch["image"] = batch["image"].float().mul_(scale).add_(offset)  # as the image processor
        return batch


def predict(
    accelerator: Accelerator,
    model: torch.nn.Module,
    batches: EvaluationBatches,
    loss: str = "softmax",
    **sizes: Any,
) -> dict[str, Any]:
    """Run a classifier on all samples of all processes.

    Args:
        sizes: additional arguments of the forward, such as `patch_size`.

    Returns:
        On every process, for all samples with a readable image, in the order of the data set: "ranked" (number, 5)
        class numbers, best first, their "probabilities", "label", "loss" and "index"; and "skipped", the number of
        unreadable images. If images may have several labels, also "scores" (number, classes).

    Raises:
        ValueError: there are no samples, or no image can be read.
    """
    predictions = collect(accelerator, model, batches, partial(_scores, model, loss=loss, sizes=sizes))
    if not len(predictions["index"]):
        raise ValueError(f"none of the {predictions['skipped']} images can be read")
    return predictions


@torch.no_grad()
def collect(
    accelerator: Accelerator,
    model: torch.nn.Module,
    batches: EvaluationBatches,
    compute: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> dict[str, Any]:
    """Run `compute` on all samples of all processes; return its results in the form of `predict`.

    Args:
        compute: batch -> named tensors, one row per sample; called under autocast, with `model` in evaluation mode.

    Raises:
        ValueError: there are no samples.
    """
    was_training, device = model.training, accelerator.device
    model.eval()
    lengths: Any = accelerator.gather(torch.tensor([len(batches.loader)], device=device))
    rows: list[dict[str, torch.Tensor]] = []
    for batch in islice(batches, int(lengths.max())):
        with accelerator.autocast():
            results = compute(batches.on_device(batch))
        if rows:  # only now, while the device computes this batch
            rows[-1] = on_cpu(rows[-1])
        rows.append({**results, **{name: batch[name] for name in ("label", "valid", "index")}})
    model.train(was_training)
    columns = {name: torch.cat([row[name].cpu() for row in rows]) for name in (rows[0] if rows else ())}
    for name, column in columns.items() if accelerator.num_processes > 1 else ():
        parts = (accelerator.gather(part.to(device)) for part in column.split(_ROWS))
        columns[name] = torch.cat([cast(torch.Tensor, part).cpu() for part in parts])
    return drop_padding({name: column.numpy() for name, column in columns.items()})


def _scores(model: torch.nn.Module, batch: dict[str, torch.Tensor], loss: str, sizes: dict) -> dict[str, torch.Tensor]:
    """Best classes and loss of each sample of one batch."""
    logits = model(**model_inputs(batch), **sizes).logits.float()
    targets = make_targets(batch["label"].clamp(min=0), logits.shape[1])
    ranked = logits.topk(min(TOP_K, logits.shape[1])).indices
    best = (logits.sigmoid() if loss == "sigmoid" else logits.softmax(dim=1)).gather(1, ranked)
    results = {"ranked": ranked, "probabilities": best, "loss": cross_entropy(logits, targets, loss)}
    return results | ({"scores": logits.sigmoid()} if batch["label"].ndim == 2 else {})


def make_targets(
    labels: torch.Tensor, num_labels: int, label_smoothing: float = 0.0, kind: str = "softmax"
) -> torch.Tensor:
    """Convert class numbers (batch,), or indicators of several labels (batch, num_labels), to float targets.

    Smoothing mixes a softmax target with the uniform distribution, and moves each sigmoid target toward 1/2 (no
    original smooths sigmoid targets). Tested against `optax.smooth_labels` (tests/goldens/training/losses.npz).

    Returns:
        (batch, num_labels)
    """
    targets = F.one_hot(labels, num_labels) if labels.ndim == 1 else labels
    rest = 0.5 if kind == "sigmoid" else 1 / num_labels
    return targets.float() * (1 - label_smoothing) + label_smoothing * rest


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, kind: str = "softmax", weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss of each sample, in float32, as `softmax_xent` and `sigmoid_xent` of big_vision.

    Args:
        logits, targets: (batch, num_labels)
        kind: "softmax", or "sigmoid": binary cross-entropies summed over the labels.
        weights: (num_labels,), the weight of each label's term; None: all 1.

    Returns:
        (batch,)
    """
    logits = logits.float()
    if kind == "sigmoid":
        terms = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    else:
        terms = -targets * F.log_softmax(logits, dim=-1)
    return (terms if weights is None else terms * weights).sum(dim=-1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Start copying a batch to the device; tensors that are read on the CPU stay there."""
    read = ("index", "row", "spatial_shapes")
    return {name: tensor if name in read else tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def model_inputs(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a model's forward for a batch; for images as patches, also their grids and masks."""
    patches: dict[str, Any] = {name: batch[name] for name in _PATCH_INPUTS if name in batch}
    if "spatial_shapes" in patches:  # a list, as DistributedDataParallel moves all tensors to the device
        patches["spatial_shapes"] = patches["spatial_shapes"].tolist()
    return {"pixel_values": batch["image"], **patches}


def drop_padding(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """Drop padding and unreadable images, and sort the others in the order of the data set."""
    if not columns:
        raise ValueError("the evaluation split is empty")
    real = columns["index"] >= 0
    good = real & columns["valid"].astype(bool)
    order = np.argsort(columns["index"][good], kind="stable")
    kept = {name: values[good][order] for name, values in columns.items() if name != "valid"}
    return {**kept, "skipped": int(real.sum() - good.sum())}


def score_classes(predictions: dict[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Return the accuracy of each class with images as "accuracy/NAME".

    If images may have several labels, it is the average precision, as "average_precision/NAME".

    Args:
        predictions: the result of `predict`.
        names: unique class names, by number.
    """
    labels = predictions["label"]
    if labels.ndim == 2:
        precisions = average_precision(predictions["scores"], labels)
        return {f"average_precision/{name}": float(x) for name, x in zip(names, precisions, strict=True) if x == x}
    right = predictions["ranked"][:, 0] == labels
    return {f"accuracy/{names[n]}": float(right[labels == n].mean()) for n in np.unique(labels[labels >= 0])}


def score(
    predictions: dict[str, Any],
    real_labels: list[list[int]] | None = None,
    thresholds: Sequence[float] | None = None,
) -> dict[str, float | int]:
    """Return the metrics of `predict`'s result.

    With `real_labels`, images may be unlabeled in the data set; then only ReaL accuracy is returned.

    Raises:
        ValueError: images have no label.
    """
    ranked, labels, results = predictions["ranked"], predictions["label"], {}
    if missing := int((labels < 0).sum()):
        if real_labels is None:
            raise ValueError(f"{missing} of {len(labels)} images have no label; choose another split")
    else:
        results["loss"] = float(predictions["loss"].mean())
        if labels.ndim == 2:  # several labels: the first prediction must be one of them
            results["accuracy"] = float(labels[np.arange(len(labels)), ranked[:, 0]].mean())
            results |= score_labels(predictions["scores"], labels, thresholds)
        else:
            results |= top_k_accuracy(ranked, labels) | mean_per_class_accuracy(ranked, labels)
    if real_labels is not None:
        chosen = [real_labels[index] for index in predictions["index"]]
        results["real_accuracy"] = top_k_accuracy(ranked, chosen).get("accuracy", 0.0)  # arXiv 2006.07159
        results["real_images"] = sum(len(labels) > 0 for labels in chosen)
    return {**results, "samples": len(labels), "skipped": predictions["skipped"]}


def top_k_accuracy(ranked: np.ndarray, labels: Iterable[Any], ks: Sequence[int] = (1, 5)) -> dict[str, float]:
    """Return the share of samples with their label, or one of their labels, among the first k predictions, for each k.

    Samples with an empty list of labels are not counted.

    Args:
        ranked: (images, k or more) class numbers, best first.
        labels: a class number or a list of them for each image.
    """
    hits = [np.isin(row, label) for row, label in zip(ranked, labels, strict=True) if np.size(label)]
    return {
        "accuracy" if k == 1 else f"top{k}_accuracy": float(np.mean([hit[:k].any() for hit in hits]))
        for k in ks
        if hits and k <= len(hits[0])
    }


def mean_per_class_accuracy(ranked: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the accuracy of each class, averaged over the classes that occur."""
    counts, right = np.bincount(labels), np.bincount(labels, weights=ranked[:, 0] == labels)
    return {"mean_per_class_accuracy": float((right[counts > 0] / counts[counts > 0]).mean())}


def average_precision(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the average precision of each class: the sum of precision times the step in recall, without interpolation.

    Args:
        scores: (images, classes)
        labels: (images, classes), 1 for the labels of an image, else 0.

    Returns:
        (classes,); NaN for a class that no image has.
    """
    results = np.full(labels.shape[1], np.nan)
    for number, (score, label) in enumerate(zip(scores.T, labels.T > 0, strict=True)):
        if label.any():
            found, images, _ = _counts_by_threshold(score, label)
            precision, recall = found / images, found / label.sum()
            results[number] = (np.diff(recall, prepend=0) * precision).sum()
    return results


def _counts_by_threshold(score: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count, for each distinct score from the highest on, the images with at least that score.

    Returns:
        Number of images that have the label, number of all images, and the score.
    """
    order = np.argsort(-score, kind="stable")
    last = np.flatnonzero(np.append(np.diff(score[order]) != 0, True))  # of equal scores
    return np.cumsum(label[order])[last], last + 1, score[order][last]


def choose_thresholds(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the threshold of each class with the best F1 score; 0.5 for a class that no image has.

    A threshold lies in the middle between the lowest score that is predicted and the next one below.
    """
    thresholds = np.full(labels.shape[1], 0.5)
    for number, (score, label) in enumerate(zip(scores.T.astype(float), labels.T > 0, strict=True)):
        if label.any():
            found, images, at = _counts_by_threshold(score, label)
            best = int((2 * found / (images + label.sum())).argmax())
            thresholds[number] = (at[best] + (at[best + 1] if best + 1 < len(at) else 0)) / 2
    return thresholds


def f1_scores(predicted: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the F1 score over all labels (micro), and the mean of the classes' F1 scores (macro).

    A class that is neither predicted nor a label has an F1 score of 0, as in scikit-learn.

    Args:
        predicted, labels: (images, classes) bool.
    """
    right, wrong = (predicted & labels).sum(axis=0), (predicted ^ labels).sum(axis=0)
    each = 2 * right / np.maximum(2 * right + wrong, 1)
    return float(2 * right.sum() / max(2 * right.sum() + wrong.sum(), 1)), float(each.mean())


def score_labels(
    scores: np.ndarray, labels: np.ndarray, thresholds: Sequence[float] | np.ndarray | None = None
) -> dict[str, float]:
    """Return mean average precision over the classes that occur, and micro and macro F1 at the thresholds.

    Args:
        scores, labels: (images, classes)
        thresholds: (classes,); None: 0.5.
    """
    micro, macro = f1_scores(scores >= np.asarray(0.5 if thresholds is None else thresholds), labels > 0)
    precisions = average_precision(scores, labels)
    mean = float(np.nanmean(precisions)) if not np.isnan(precisions).all() else 0.0
    return {"mean_average_precision": mean, "micro_f1": micro, "macro_f1": macro}
