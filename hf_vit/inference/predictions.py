"""Predictions of a model for a split: every sample counts exactly once, on any number of processes."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset

from ..data.labels import distinguish, names_of
from ..data.loaders import read_ahead
from ..data.samplers import Sample
from ..data.splits import Split
from ..data.workers import count_workers, worker_options
from ..models.sizes import as_pair
from ..settings.fields import DataSettings
from .batches import ImageReader, Read, as_read
from .multi_label import average_precision, choose_thresholds, score_labels

Batch: TypeAlias = dict[str, torch.Tensor]
TOP_K = 5
_ROWS = 2**14  # of a column that processes exchange at once
_PATCH_INPUTS = ("pixel_attention_mask", "spatial_shapes", "keep")


class EvaluationBatches:
    """Evaluation batches of this process, all of one length, then batches of padding (index -1) forever.

    Unreadable images are left out, and logged.

    Args:
        config: the model's configuration.
        reader: what reads and preprocesses the images; None: the image processor.
    """

    def __init__(
        self,
        settings: DataSettings,
        split: Split,
        processor: Any,
        config: Any,
        accelerator: Accelerator,
        reader: ImageReader | None = None,
    ):
        is_native = getattr(processor, "preset", None) == "native"
        options: dict[str, Any] = {"padding": "max_num_patches"} if is_native else {}  # all batches have one shape
        self.reader = reader or ImageReader(processor, **options)
        self.split, self.device = split, accelerator.device
        processes, size = (accelerator.num_processes, accelerator.process_index), settings.eval_batch_size
        self.loader: Any = eval_loader(SplitImages(split, self.reader), size, *processes, settings.num_workers)
        height, width = as_pair(config.image_size)
        black = Image.new("RGB" if config.num_channels == 3 else "L", (width, height))
        label: Any = np.zeros(split.num_labels, np.float32) if split.multi_label or split.targets else -1
        blank = _merge(self.reader([(-1, black)]), [label])
        self.padding = {name: tensor.expand(size, *tensor.shape[1:]).clone() for name, tensor in blank.items()}

    def __iter__(self) -> Iterator[Batch]:
        size = len(self.padding["index"])
        for read, labels in self.loader:
            for error in read.unreadable.values():
                self.split.log_unreadable(error)
            batch = _merge(read, labels) if read.numbers else self.padding
            if (length := len(batch["index"])) < size:
                batch = {name: torch.cat([tensor, self.padding[name][length:]]) for name, tensor in batch.items()}
            yield batch
        while True:
            yield self.padding

    def on_device(self, batch: Batch) -> Batch:
        """Return a batch on the device, with normalized images."""
        batch = to_device(batch, self.device)
        if self.reader.returns_levels:
            batch["image"] = self.reader.normalize(batch["image"])
        return batch


class SplitImages(Dataset):
    """Images of a split in batches: what was read, and the labels of the readable ones.

    An index is a row, or (row, undecoded sample) from `read_ahead`.
    """

    def __init__(self, split: Split, reader: ImageReader):
        self.split, self.reader = split, reader

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, items: list[Any]) -> tuple[Read, list[Any]]:
        samples = dict(item if isinstance(item, tuple) else (item, self.split.samples[item]) for item in items)
        read = self.reader([(row, self.split.image(sample, row)) for row, sample in samples.items()])
        return read, [self.split.label(samples[row]) for row in read.numbers]


def eval_loader(images: SplitImages, batch_size: int, processes: int, rank: int, num_workers: int | str) -> DataLoader:
    """Return this process's loader; over all processes, every sample comes once.

    The processes may have different numbers and sizes of batches. Workers persist between evaluations, because starting
    them takes time.
    """
    split, workers = images.split, count_workers(num_workers)
    rows = range(rank, len(split), processes)
    if split.is_sharded:  # a block has consecutive rows
        rows = range(len(split) * rank // processes, len(split) * (rank + 1) // processes)
    batches = read_ahead(split, BatchSampler(rows, batch_size, drop_last=False), lambda row: Sample(row, 0))
    options = worker_options(workers, split.needs_spawn)
    return DataLoader(images, batch_sampler=batches, collate_fn=as_read, persistent_workers=workers > 0, **options)


def _merge(read: Read, labels: Sequence[Any]) -> Batch:
    """Return the images of a batch as "image", and their other inputs, "label" and "index"."""
    inputs = dict(read.inputs)
    image = inputs.pop("pixel_values")
    label = torch.from_numpy(np.stack(labels))
    return {"image": image, **inputs, "label": label, "index": torch.tensor(read.numbers)}


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
        On every process, for all samples with a readable image, in the order of the dataset: "ranked" (number, 5)
        class indices, best first, their "probabilities", "label", "loss" and "index"; and "skipped", the number of
        unreadable images. If images may have several labels, also "scores" (number, classes).

    Raises:
        ValueError: there are no samples, or no image can be read.
    """
    predictions = collect(accelerator, model, batches, partial(_scores, model, loss=loss, sizes=sizes))
    if not len(predictions["index"]):
        raise ValueError(f"none of the {predictions['skipped']} images can be read")
    return predictions


def evaluate_classifier(
    accelerator: Accelerator, model: torch.nn.Module, batches: EvaluationBatches, loss: str, config: Any, **sizes: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the result of `predict`, and the metrics of a trained classifier, those of each class included.

    If images may have several labels, the configuration gets the thresholds that are best for these images.
    """
    predictions = predict(accelerator, model, batches, loss, **sizes)
    if batches.split.multi_label:
        config.label_thresholds = choose_thresholds(predictions["scores"], predictions["label"]).tolist()
    return predictions, score(predictions) | score_classes(predictions, distinguish(names_of(config)))


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
            rows[-1] = {name: tensor.cpu() for name, tensor in rows[-1].items()}
        rows.append({**results, **{name: batch[name] for name in ("label", "index")}})
    model.train(was_training)
    columns = {name: torch.cat([row[name].cpu() for row in rows]) for name in (rows[0] if rows else ())}
    for name, column in columns.items() if accelerator.num_processes > 1 else ():
        parts = (accelerator.gather(part.to(device)) for part in column.split(_ROWS))
        columns[name] = torch.cat([cast(torch.Tensor, part).cpu() for part in parts])
    return drop_padding({name: column.numpy() for name, column in columns.items()}, len(batches.split))


def _scores(model: torch.nn.Module, batch: dict[str, torch.Tensor], loss: str, sizes: dict) -> dict[str, torch.Tensor]:
    """Best classes and loss of each sample of one batch."""
    logits = model(**model_inputs(batch), **sizes).logits.float()
    targets = make_targets(batch["label"].clamp(min=0), logits.shape[1])
    ranked = logits.topk(min(TOP_K, logits.shape[1])).indices
    probabilities = logits.sigmoid() if loss == "sigmoid" else logits.softmax(dim=1)
    best = probabilities.gather(1, ranked)
    results = {"ranked": ranked, "probabilities": best, "loss": cross_entropy(logits, targets, loss)}
    return results | ({"scores": logits.sigmoid()} if batch["label"].ndim == 2 else {})


def make_targets(
    labels: torch.Tensor, num_labels: int, label_smoothing: float = 0.0, kind: str = "softmax"
) -> torch.Tensor:
    """Convert class indices (batch,), or indicators of several labels (batch, num_labels), to float targets.

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
    if weights is not None:
        terms = terms * weights
    return terms.sum(dim=-1)


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


def drop_padding(columns: dict[str, np.ndarray], number_of_images: int) -> dict[str, Any]:
    """Drop padding, sort the other rows in the order of the dataset, and count the images without a row: "skipped"."""
    if not columns:
        raise ValueError("the evaluation split is empty")
    real = columns["index"] >= 0
    order = np.argsort(columns["index"][real], kind="stable")
    kept = {name: values[real][order] for name, values in columns.items()}
    return {**kept, "skipped": number_of_images - len(order)}


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
    """Return the metrics of `predict`'s result; see `hf_vit.inference.metrics`.

    With `real_labels`, images may be unlabeled in the dataset; then only ReaL accuracy is returned.

    Raises:
        ValueError: images have no label.
    """
    from .metrics import MeanPerClassAccuracy, TopKAccuracy, set_accuracy  # here: importing evaluate takes seconds

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
            results |= TopKAccuracy().compute(predictions=ranked, references=labels) or {}
            results |= MeanPerClassAccuracy().compute(predictions=ranked, references=labels) or {}
    if real_labels is not None:
        chosen = [real_labels[index] for index in predictions["index"]]
        results["real_accuracy"] = set_accuracy(ranked, chosen).get("accuracy", 0.0)
        results["real_images"] = sum(len(labels) > 0 for labels in chosen)
    return {**results, "samples": len(labels), "skipped": predictions["skipped"]}
