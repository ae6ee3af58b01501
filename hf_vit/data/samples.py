"""Data sets and loaders: samples of training and evaluation, and their batches.

Training reads an endless sequence of positions: one epoch after another, each in its own order. Optimiser step s takes
the positions from s * batch_size to (s + 1) * batch_size; processes and accumulated forwards share them. The number of
the step alone determines the samples, on any number of processes and workers.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.image_reading import ImageReadingError, load_image, to_mode
from .augmentation import Box, TrainTransform, sample_generator
from .batches import JoinedBatches, LaneBatches, Shares, StepBatches, runs_of_rows
from .columns import find_column, find_label_column, is_image, is_list_of, no_classes
from .orders import BalancedOrder, LaneOrder, ShuffledOrder
from .shard_index import Columns, open_index
from .shards import Shards
from .workers import worker_options

SKIPPED_IMAGES = "skipped_images.txt"  # file of an output folder: a line for each unreadable image
_MOST_LOGGED = 10  # unreadable images that are logged by name

logger = logging.getLogger(__name__)


@dataclass
class Split:
    """A split of a data set, with undecoded images, and the meaning of its labels."""

    samples: Any  # datasets.Dataset or Shards
    image_column: str
    label_column: str | None
    label_names: list[str] | None
    num_labels: int
    multi_label: bool = False
    numbers: list[int] | None = None  # the data's class number -> the one to use; None: the same
    skipped_file: Path | None = None  # list of the unreadable images
    _skipped: set[str] = field(default_factory=set)  # unreadable images that this process has met

    def __len__(self) -> int:
        return len(self.samples)

    def image(self, sample: dict, row: int) -> dict[str, Any]:
        """Return a sample's undecoded image, {"bytes", "path"}; the path is its name in messages."""
        image = sample[self.image_column] or {"bytes": None, "path": None}
        if image["path"] is None:
            return {"bytes": image["bytes"] or b"", "path": f"row {row}"}
        return image

    def log_unreadable(self, error: ImageReadingError) -> None:
        """Add an unreadable image to `skipped_file`, in which each comes once, and log the first ones."""
        message = " ".join(str(error).split())
        if message in self._skipped:
            return
        self._skipped.add(message)
        number = len(self._skipped)
        if self.skipped_file is not None:
            self.skipped_file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.skipped_file, "a+", encoding="utf-8", errors="backslashreplace") as file:
                file.seek(0)
                lines = file.read().splitlines()  # other processes write to it, too
                if message in lines:
                    return
                file.write(f"{message}\n")
            number = len(lines) + 1
        if number <= _MOST_LOGGED:
            is_last = self.skipped_file is not None and number == _MOST_LOGGED
            logger.warning(f"skipped: {message}" + (f"; the next ones are in {self.skipped_file}" if is_last else ""))

    def label(self, sample: dict) -> Any:
        """Return a sample's class number; -1 without a label; indicators (num_labels,) if it may have several."""
        if self.label_column is None:
            return -1
        label = sample[self.label_column]
        if not self.multi_label:
            return -1 if label is None else self._renumber(label)
        indicators = np.zeros(self.num_labels, np.float32)
        indicators[[self._renumber(number) for number in label]] = 1
        return indicators

    def class_numbers(self, purpose: str = "it") -> np.ndarray:
        """Return the class number of each image, (images,); -1 for no label.

        Args:
            purpose: the setting that needs them, for errors.

        Raises:
            ValueError: images have no labels, or several, or lie in shards, whose labels are not read in advance.
        """
        kind = "images with several labels" if self.multi_label else "images without labels"
        if self.multi_label or self.label_column is None or isinstance(self.samples, Shards):
            kind = "shards" if isinstance(self.samples, Shards) else kind
            raise ValueError(f"{purpose}, which counts images per class: this does not work with {kind}")
        return np.array([self._renumber(label) for label in _read_labels(self.samples, self.label_column)], np.int64)

    def _renumber(self, label: int) -> int:
        return label if self.numbers is None or label < 0 else self.numbers[label]


def open_split(
    samples: Any,
    image_column: str | None = None,
    label_column: str | None = None,
    needs_labels: bool = True,
    counts_labels: bool = True,
    together: int | None = None,
) -> Split:
    """Open a split: find the columns of images and labels, and read the class names.

    Args:
        samples: a `datasets.Dataset`, or the names of shards, which are indexed.
        counts_labels: count the classes of shards without class names by reading all labels.
        together: number of rows of shards that are shuffled together.

    Raises:
        ValueError: not exactly one column fits; the message lists the columns.
    """
    if isinstance(samples, list):
        return _open_shards(samples, Columns(image_column, label_column, needs_labels, counts_labels), together)
    features = samples.features
    image_column = find_column(features, image_column, is_image, "image", "--image-column")
    samples = samples.cast_column(image_column, datasets.Image(decode=False))
    if not needs_labels and label_column is None:
        return Split(samples, image_column, None, None, 0)
    label_column = find_label_column(features, label_column)
    feature = features[label_column]
    if needs_labels and samples.data.column(label_column).null_count == len(samples.data) > 0:
        raise no_classes(features)  # `datasets` reads a single folder of images so
    if isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string"):
        samples = samples.class_encode_column(label_column)
        feature = samples.features[label_column]
    multi_label = is_list_of(feature, datasets.ClassLabel)
    class_label = getattr(feature, "feature", feature)  # the feature of a list's entries
    if isinstance(class_label, datasets.ClassLabel):
        names = class_label.names
        return Split(samples, image_column, label_column, names, len(names), multi_label)
    return Split(samples, image_column, label_column, None, _count_labels(samples, label_column))


def _open_shards(files: list[str], columns: Columns, together: int | None) -> Split:
    index = open_index(files, columns)
    label = index.label_column
    feature = None if label is None else index.features[label]
    multi_label = is_list_of(feature, datasets.ClassLabel)
    class_label = getattr(feature, "feature", feature)
    names = list(class_label.names or []) if isinstance(class_label, datasets.ClassLabel) else None
    num_labels = len(names) if names is not None else index.num_labels or 0
    return Split(Shards(index, together), index.image_column, label, names, num_labels, multi_label)


def _count_labels(samples: datasets.Dataset, column: str) -> int:
    """Number of classes of labels without names: class numbers from 0."""
    return max(_read_labels(samples, column)) + 1


def _read_labels(samples: datasets.Dataset, column: str) -> list[int]:
    """Read a column of class numbers; -1 for no label."""
    labels = samples.select_columns([column]).with_format("arrow")[:][column]
    return labels.fill_null(-1).to_pylist()


class TrainSamples(Dataset):
    """Augmented samples by position in the endless sequence; a later sample replaces an unreadable image."""

    def __init__(self, split: Split, transform: TrainTransform, seed: int, class_sampling: str = "natural"):
        if len(split) == 0:
            raise ValueError("the training split is empty")
        self.split, self.transform, self.seed = split, transform, seed
        if class_sampling == "balanced":
            self.order = BalancedOrder(split.class_numbers(f"--class-sampling is {class_sampling}"), seed)
        else:
            is_sharded = isinstance(split.samples, Shards)
            self.order = split.samples.order(seed) if is_sharded else ShuffledOrder(len(split), seed)

    def __getitem__(self, position: int) -> dict[str, Any]:
        epoch, place = divmod(position, len(self.split))
        failure = None
        for skipped in range(len(self.split)):
            visit, index, sample = self._read(epoch, (place + skipped * self.order.stride) % len(self.split))
            try:
                entries = self.augment(self.split.image(sample, index), sample_generator(self.seed, visit, index))
                return {**entries, "label": self._label_of(sample), "skipped": skipped}
            except ImageReadingError as error:
                self.split.log_unreadable(error)
                failure = error
        raise ValueError(f"none of the {len(self.split)} images can be read: {failure}")

    def _label_of(self, sample: dict) -> Any:
        label = self.split.label(sample)
        if self.split.label_column is not None and not self.split.multi_label and label < 0:  # of shards
            raise ValueError(f"an image of the training split has no label in the column {self.split.label_column}")
        return label

    def augment(self, image: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the sample's "image" and other entries.

        Raises:
            ImageReadingError: the image cannot be read.
        """
        if not self.transform.reduced_decoding:
            return {"image": self.transform(load_image(image, name=image["path"]), rng)}
        drawn: list[tuple[Box, int, int]] = []

        def reduce_to(height: int, width: int) -> tuple[int, int]:
            """Return the image size at which the crop is as large as the result."""
            box = self.transform.sample_box(height, width, rng)
            drawn.append((box, height, width))
            rows, columns = self.transform.size
            return math.ceil(height * rows / box.height), math.ceil(width * columns / box.width)

        decoded = load_image(image, reduce_to, image["path"])
        box, height, width = drawn[0]
        return {"image": self.transform(decoded, rng, box.scaled(decoded.height / height, decoded.width / width))}

    def __getitems__(self, positions: list[int]) -> list[dict[str, Any]]:
        """Return the samples of some positions; their blocks of shards, and those of the next ones, are prefetched."""
        if not (isinstance(self.order, LaneOrder) and self.split.samples.holds_blocks):
            return [self[position] for position in positions]
        self._prefetch(self.order, positions)
        samples = [{**self[position], "position": position} for position in positions]
        later = {position + self.order.stride for position in positions} - set(positions)
        size = len(self.split)
        self._prefetch(self.order, sorted(p for p in later if positions and p // size == positions[-1] // size))
        return samples

    def _prefetch(self, order: LaneOrder, positions: list[int]) -> None:
        self.split.samples.prefetch([order.place(*divmod(position, len(self.split))) for position in positions])

    def _read(self, epoch: int, place: int) -> tuple[int, int, dict[str, Any]]:
        """Return (earlier visits, row number, row) at a place of an epoch."""
        if isinstance(self.order, LaneOrder):
            found = self.order.place(epoch, place)
            return epoch, found.row, self.split.samples.read(found)
        visit, row = self.find(epoch, place)
        return visit, row, self.split.samples[row]

    def find(self, epoch: int, place: int) -> tuple[int, int]:
        """Return (number of earlier visits, row number) at a place of an epoch."""
        if isinstance(self.order, BalancedOrder):
            row, visit = self.order.draw(epoch, place)
            return visit, row
        return epoch, int(self.order.rows(epoch, np.array([place]))[0])


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack samples into tensors: "image" (batch, height, width, channels) uint8, "label" and the other entries."""
    if not samples:
        return {}
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


class EvalSamples(Dataset):
    """Evaluation samples by index, prepared by the image processor; `valid` is False for an unreadable image."""

    def __init__(self, split: Split, processor: Any, size: tuple[int, int], channels: int = 3):
        self.split, self.processor, self.size, self.channels = split, processor, size, channels
        self._reads_files = isinstance(processor, HfViTImageProcessor)  # transformers' take decoded images only

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.prepare(self.split.samples[index], index)

    def prepare(self, sample: dict, index: int) -> dict[str, Any]:
        """Return one sample, ready for `collate`."""
        image = self.split.image(sample, index)
        try:
            pixels = self._pixels(image, image["path"])
        except ImageReadingError as error:
            self.split.log_unreadable(error)
            return {**self.padding(), "index": index}
        return {**pixels, "label": self.split.label(sample), "valid": True, "index": index}

    def _pixels(self, image: Any, name: str = "") -> dict[str, Any]:
        """Run the processor on an image; with preset "native" the result is patches and their grid."""
        if not self._reads_files:
            image = to_mode(load_image(image, name=name), "RGB" if self.channels == 3 else "L", name=name)
        is_native = getattr(self.processor, "preset", None) == "native"
        options = {"padding": "max_num_patches"} if is_native else {}  # all samples have one shape
        entries = {name: values[0] for name, values in self.processor(image, return_tensors="np", **options).items()}
        return {"image": entries.pop("pixel_values"), **entries}

    def padding(self) -> dict[str, Any]:
        """Return a padding sample, with index -1."""
        label = np.zeros(self.split.num_labels, np.float32) if self.split.multi_label else -1
        return {**self._nothing, "label": label, "valid": False, "index": -1}

    @cached_property
    def _nothing(self) -> dict[str, Any]:
        """Entries of a black image."""
        height, width = self.size
        return self._pixels(Image.new("RGB" if self.channels == 3 else "L", (width, height)))


def _worker_options(split: Split, num_workers: int) -> dict[str, Any]:
    """Arguments of a DataLoader; workers are spawned where a thread of fsspec has connections, which a fork breaks."""
    options = worker_options(num_workers)
    if num_workers and isinstance(split.samples, Shards) and split.samples.is_served_by_thread:
        options.setdefault("multiprocessing_context", "spawn")
    return options


def train_loader(
    split: Split,
    transform: TrainTransform,
    seed: int,
    shares: Shares,
    steps: range,
    num_workers: int,
    class_sampling: str = "natural",
) -> Iterable[dict[str, torch.Tensor]]:
    """Return the training batches of this process for the steps in `steps`, one per forward."""
    samples = TrainSamples(split, transform, seed, class_sampling)
    if isinstance(samples.order, LaneOrder) and split.samples.holds_blocks:
        parts, pins = LaneBatches(shares, samples.order, steps, max(num_workers, 1)), torch.cuda.is_available()
        return JoinedBatches(load_batches(samples, parts, collate, num_workers, pins=False), parts.workers, pins)
    return load_batches(samples, StepBatches(shares, steps.start, steps.stop), collate, num_workers)


def load_batches(
    samples: TrainSamples, batches: Any, collate_fn: Callable, num_workers: int, pins: bool | None = None
) -> DataLoader:
    """Return a loader of training batches.

    Args:
        batches: batch sampler of positions.
        pins: pin the memory of batches; by default if there is a GPU.
    """
    options = {**_worker_options(samples.split, num_workers), **({"prefetch_factor": 4} if num_workers else {})}
    pins = torch.cuda.is_available() if pins is None else pins
    return DataLoader(samples, batch_sampler=batches, collate_fn=collate_fn, pin_memory=pins, **options)


def eval_loader(samples: EvalSamples, batch_size: int, processes: int, rank: int, num_workers: int) -> DataLoader:
    """Return this process's loader; over all processes, every sample comes once.

    The processes may have different numbers and sizes of batches. Workers persist between evaluations, because starting
    them takes time.
    """
    options = {**_worker_options(samples.split, num_workers), "persistent_workers": num_workers > 0}
    if isinstance(samples.split.samples, Shards):
        batches = runs_of_rows(len(samples), processes, rank, max(num_workers, 1), batch_size)
        return DataLoader(samples, batch_sampler=batches, collate_fn=collate, **options)
    mine = torch.utils.data.Subset(samples, range(rank, len(samples), processes))
    return DataLoader(mine, batch_size=batch_size, collate_fn=collate, **options)
