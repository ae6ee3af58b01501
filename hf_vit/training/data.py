"""From a data set to batches: which sample is seen when, by which process, and what workers hand over.

Training reads an endless sequence of positions: epoch after epoch, each in an order of its own. Optimiser step s takes
positions s * batch_size and following; processes and accumulated forwards share them. So where training stands in
the data is the number of the step, on any number of processes and workers.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import datasets
import numpy as np
import torch
from datasets.distributed import split_dataset_by_node
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .augmentation import TrainTransform, sample_generator
from .orders import ShuffledOrder
from .preemption import leave_process_group

_SHUFFLE_BUFFER = 10_000  # raw samples of a stream that are held to draw from


@dataclass
class Split:
    """A data set with undecoded images, and what its labels mean."""

    samples: Any  # datasets.Dataset or datasets.IterableDataset
    image_column: str
    label_column: str | None
    label_names: list[str] | None
    num_labels: int
    multi_label: bool = False
    numbers: list[int] | None = None  # for each of the data's class numbers the one that counts; None: the same

    def __len__(self) -> int:
        return len(self.samples)

    def label(self, sample: dict) -> Any:
        """A class number; for several labels, indicators (num_labels,); -1 without labels."""
        if self.label_column is None:
            return -1
        label = sample[self.label_column]
        if not self.multi_label:
            return -1 if label is None else self._renumber(label)
        indicators = np.zeros(self.num_labels, np.float32)
        indicators[[self._renumber(number) for number in label]] = 1
        return indicators

    def _renumber(self, label: int) -> int:
        return label if self.numbers is None or label < 0 else self.numbers[label]


def open_split(
    samples: Any, image_column: str | None = None, label_column: str | None = None, needs_labels: bool = True
) -> Split:
    """Find images and labels by the types of the columns.

    Raises:
        ValueError: listing the columns, when there is not exactly one that fits.
    """
    if samples.features is None:
        samples = samples._resolve_features()
    features = samples.features
    image_column = find_column(features, image_column, is_image, "image", "--image_column")
    samples = samples.cast_column(image_column, datasets.Image(decode=False))
    if not needs_labels and label_column is None:
        return Split(samples, image_column, None, None, 0)
    label_column = find_label_column(features, label_column)
    feature = features[label_column]
    if isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string"):
        samples = samples.class_encode_column(label_column)
        feature = samples.features[label_column]
    multi_label = _is_list_of(feature, datasets.ClassLabel)
    class_label = getattr(feature, "feature", feature)  # of a list what it is of
    if isinstance(class_label, datasets.ClassLabel):
        names = class_label.names
        return Split(samples, image_column, label_column, names, len(names), multi_label)
    return Split(samples, image_column, label_column, None, _count_labels(samples, label_column))


def is_image(feature: Any) -> bool:
    """Whether a column has images."""
    return isinstance(feature, datasets.Image)


def _is_list_of(feature, kind) -> bool:
    return isinstance(feature, datasets.List | datasets.LargeList) and isinstance(feature.feature, kind)


def find_column(
    features: Mapping[str, Any], name: str | None, fits: Callable[[Any], bool], what: str, option: str
) -> str:
    """The column called `name`, or else the one column that fits.

    Args:
        what: the kind of column, and `option`, how to name one: for the message.

    Raises:
        ValueError: listing the columns, when there is no such column, or not exactly one that fits.
    """
    if name is not None:
        if name not in features:
            raise ValueError(f"there is no column {name!r}; the columns are {', '.join(features)}")
        return name
    found = [column for column, feature in features.items() if fits(feature)]
    if len(found) != 1:
        columns = ", ".join(f"{column} ({_describe_feature(feature)})" for column, feature in features.items())
        raise ValueError(
            f"{len(found) or 'no'} columns of type {what}; choose with {option}; the columns are {columns}"
        )
    return found[0]


def find_label_column(features: Mapping[str, Any], name: str | None) -> str:
    """The column called `name`, or else the one of class labels; else of lists of them; else of whole numbers."""
    kinds: tuple[Callable[[Any], bool], ...] = (
        lambda feature: isinstance(feature, datasets.ClassLabel),
        lambda feature: _is_list_of(feature, datasets.ClassLabel),
        lambda feature: isinstance(feature, datasets.Value) and "int" in feature.dtype,
    )
    present = [kind for kind in kinds if any(map(kind, features.values()))]
    return find_column(features, name, present[0] if present else kinds[0], "class label", "--label_column")


def _describe_feature(feature) -> str:
    return feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__


def _count_labels(samples, column: str) -> int:
    """Labels without names are class numbers from 0 on."""
    if not isinstance(samples, datasets.Dataset):
        raise ValueError(f"column {column!r} of the stream does not say how many classes there are; name a ClassLabel")
    return int(max(samples.with_format("numpy")[column])) + 1


def decode(sample: dict) -> Image.Image | None:
    """Read {"bytes": ..., "path": ...}; None for a picture that cannot be read."""
    try:
        source = io.BytesIO(sample["bytes"]) if sample["bytes"] is not None else sample["path"]
        image = Image.open(source)
        image.load()
        return ImageOps.exif_transpose(image)
    except (OSError, ValueError, SyntaxError, TypeError, EOFError, Image.DecompressionBombError):
        return None


class _TrainSamples(Dataset):
    """Position in the endless sequence -> an augmented sample; the one after it stands in for a broken image."""

    def __init__(self, split: Split, transform: TrainTransform, seed: int):
        self.split, self.transform, self.seed = split, transform, seed
        self.order = ShuffledOrder(len(split), seed)

    def __getitem__(self, position: int) -> dict[str, Any]:
        epoch, place = divmod(position, len(self.split))
        for skipped in range(len(self.split)):
            index = int(self.order.rows(epoch, np.array([(place + skipped) % len(self.split)]))[0])
            sample = self.split.samples[index]
            image = decode(sample[self.split.image_column])
            if image is not None:
                pixels = self.transform(image, sample_generator(self.seed, epoch, index))
                return {"image": pixels, "label": self.split.label(sample), "skipped": skipped}
        raise ValueError(f"none of the {len(self.split)} images can be read")


@dataclass(frozen=True)
class Shares:
    """How one optimiser step is divided: batch_size = per_device * processes * accumulation."""

    batch_size: int
    per_device: int
    processes: int = 1
    rank: int = 0

    def __post_init__(self):
        if self.batch_size % (self.per_device * self.processes):
            raise ValueError(
                f"batch_size ({self.batch_size}) is not a multiple of per_device_batch_size ({self.per_device}) "
                f"x processes ({self.processes})"
            )

    @property
    def accumulation(self) -> int:
        """Forwards of each process per optimiser step."""
        return self.batch_size // (self.per_device * self.processes)

    def micro_batch(self, forward: int) -> int:
        """Number of the micro-batch within its step that this process sees in one forward."""
        return forward * self.processes + self.rank

    def positions(self, step: int, forward: int) -> range:
        """What this process sees in one forward of one step."""
        start = step * self.batch_size + self.micro_batch(forward) * self.per_device
        return range(start, start + self.per_device)


class StepBatches:
    """Batch sampler: the positions of this process, forward by forward, from one step to another."""

    def __init__(self, shares: Shares, start_step: int, num_steps: int):
        self.shares, self.start_step, self.num_steps = shares, start_step, num_steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start_step, self.num_steps):
            for forward in range(self.shares.accumulation):
                yield list(self.shares.positions(step, forward))

    def __len__(self) -> int:
        return (self.num_steps - self.start_step) * self.shares.accumulation


class _StreamBatches(IterableDataset):
    """Batches of a stream, the share of one process; its workers read everything and decode every n-th batch.

    So the order does not depend on the number of workers, and a run resumes by reading past what was seen, undecoded.
    """

    def __init__(self, split: Split, transform: TrainTransform, seed: int, shares: Shares, start_step: int):
        stream = split.samples.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
        self.stream = split_dataset_by_node(stream, shares.rank, shares.processes)
        self.split, self.transform, self.seed, self.shares = split, transform, seed, shares
        self.start = start_step * shares.accumulation

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = torch.utils.data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for batch_number, (epoch, batch) in enumerate(self._raw_batches()):
            if batch_number >= self.start and (batch_number - self.start) % workers == number:
                yield self._augment(batch, epoch, batch_number)

    def _raw_batches(self) -> Iterator[tuple[int, dict[str, list]]]:
        """(epoch, columns of one forward), for ever."""
        epoch = 0
        while True:
            self.stream.set_epoch(epoch)
            empty = True
            for batch in self.stream.iter(self.shares.per_device, drop_last_batch=True):
                empty = False
                yield epoch, batch
            if empty:
                raise ValueError(f"the stream has fewer than {self.shares.per_device} images per process")
            epoch += 1

    def _augment(self, batch: dict[str, list], epoch: int, batch_number: int) -> dict[str, torch.Tensor]:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        images = [decode(row[self.split.image_column]) for row in rows]
        good = [number for number, image in enumerate(images) if image is not None]
        if not good:
            raise ValueError(f"none of {len(rows)} images in a row can be read")
        samples = []
        for number in range(len(rows)):
            chosen = number if images[number] is not None else good[number % len(good)]
            rng = sample_generator(self.seed, epoch, batch_number * self.shares.per_device + number)
            pixels = self.transform(images[chosen], rng)  # pyright: ignore[reportArgumentType]
            samples.append({"image": pixels, "label": self.split.label(rows[chosen]), "skipped": int(chosen != number)})
        return _collate(samples)


def _collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Samples -> image (batch, height, width, channels) uint8, and label and the other entries as tensors."""
    batch = {"image": torch.from_numpy(np.stack([sample["image"] for sample in samples]))}
    for name in samples[0].keys() - {"image"}:
        batch[name] = torch.from_numpy(np.asarray([sample[name] for sample in samples]))
    return batch


class EvalSamples(Dataset):
    """Index -> a sample as the image processor prepares it; `valid` is False for an image that cannot be read."""

    def __init__(self, split: Split, processor: Any, size: tuple[int, int], channels: int = 3):
        self.split, self.processor, self.size, self.channels = split, processor, size, channels

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.prepare(self.split.samples[index], index)

    def prepare(self, sample: dict, index: int) -> dict[str, Any]:
        """One sample of the split, ready to be collated."""
        image = decode(sample[self.split.image_column])
        if image is None:
            return {**self.padding(), "index": index}
        return {**self._pixels(image), "label": self.split.label(sample), "valid": True, "index": index}

    def _pixels(self, image: Image.Image) -> dict[str, Any]:
        """What the processor makes of an image; with the preset "native", its patches and how they lie."""
        entries = {name: values[0] for name, values in self.processor(image, return_tensors="np").items()}
        return {"image": entries.pop("pixel_values"), **entries}

    def padding(self) -> dict[str, Any]:
        """A sample that is none: its index is -1."""
        label = np.zeros(self.split.num_labels, np.float32) if self.split.multi_label else -1
        return {**self._nothing, "label": label, "valid": False, "index": -1}

    @cached_property
    def _nothing(self) -> dict[str, Any]:
        """A black image."""
        height, width = self.size
        return self._pixels(Image.new("RGB" if self.channels == 3 else "L", (width, height)))


class _EvalStream(IterableDataset):
    """The share of one process of a streamed split, in order."""

    def __init__(self, samples: EvalSamples, processes: int, rank: int):
        self.samples, self.processes, self.rank = samples, processes, rank

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index, batch in enumerate(self.samples.split.samples.iter(1)):
            if index % self.processes == self.rank:
                yield self.samples.prepare({name: values[0] for name, values in batch.items()}, index)


def train_loader(
    split: Split, transform: TrainTransform, seed: int, shares: Shares, steps: range, num_workers: int
) -> DataLoader:
    """Batches for the steps in `steps`, one per forward; each process makes its own."""
    options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": torch.cuda.is_available()}
    options["worker_init_fn"] = leave_process_group
    if num_workers:
        options["prefetch_factor"] = 4
    if isinstance(split.samples, datasets.IterableDataset):
        stream = _StreamBatches(split, transform, seed, shares, steps.start)
        return DataLoader(stream, batch_size=None, **options)
    if len(split) == 0:
        raise ValueError("the training split is empty")
    batches = StepBatches(shares, steps.start, steps.stop)
    return DataLoader(_TrainSamples(split, transform, seed), batch_sampler=batches, collate_fn=_collate, **options)


def eval_loader(samples: EvalSamples, batch_size: int, processes: int, rank: int, num_workers: int) -> DataLoader:
    """Every sample once over all processes, in order; batches of one process may be fewer or smaller than another's.

    Workers stay from one evaluation to the next: to fork a process that has many threads takes time, and luck.
    """
    is_stream = isinstance(samples.split.samples, datasets.IterableDataset)
    num_workers = min(num_workers, 1) if is_stream else num_workers
    options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": _collate}
    options |= {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    options["worker_init_fn"] = leave_process_group
    if is_stream:
        return DataLoader(_EvalStream(samples, processes, rank), **options)
    mine = range(rank, len(samples), processes)
    return DataLoader(torch.utils.data.Subset(samples, mine), **options)
