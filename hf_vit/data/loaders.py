"""Data sets that decode and augment, and loaders of their batches; `samplers` has the order of the images."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.image_reading import ImageReadingError, load_image, to_mode
from .augmentation import Box, TrainTransform, sample_generator
from .samplers import (
    BalancedSampler,
    BatchLayout,
    BlockBatchSampler,
    BlockSampler,
    ShuffledSampler,
    StepBatchSampler,
    consecutive_batches,
)
from .splits import Split
from .workers import worker_options


class TrainDataset(Dataset):
    """Augmented samples by position in the endless sequence; a later sample replaces an unreadable image."""

    def __init__(self, split: Split, transform: TrainTransform, seed: int, class_sampling: str = "natural"):
        if len(split) == 0:
            raise ValueError("the training split is empty")
        self.split, self.transform, self.seed = split, transform, seed
        self.sampler: ShuffledSampler | BalancedSampler | BlockSampler
        if class_sampling == "balanced":
            self.sampler = BalancedSampler(split.class_numbers(f"--class-sampling is {class_sampling}"), seed)
        else:
            self.sampler = split.samples.sampler(seed) if split.is_sharded else ShuffledSampler(len(split), seed)

    def __getitem__(self, position: int) -> dict[str, Any]:
        epoch, place = divmod(position, len(self.split))
        failure = None
        for skipped in range(len(self.split)):
            drawn = self.sampler.draw(epoch, (place + skipped * self.sampler.stride) % len(self.split))
            sample = self.split.samples[drawn.row] if drawn.block is None else self.split.samples.read(drawn)
            try:
                image, rng = self.split.image(sample, drawn.row), sample_generator(self.seed, drawn.visit, drawn.row)
                return {**self.augment(image, rng), "label": self._label_of(sample), "skipped": skipped}
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


class BlockDataset(TrainDataset):
    """Training samples of shards that are read in blocks; takes the parts of a `BlockBatchSampler`."""

    def __getitems__(self, part: tuple[list[int], list[int]]) -> list[dict[str, Any]]:
        """Return the samples of a part; its blocks, and those of the next part, are prefetched."""
        positions, following = part
        self._prefetch(positions)
        samples = [{**self[position], "position": position} for position in positions]
        self._prefetch(following)
        return samples

    def _prefetch(self, positions: list[int]) -> None:
        self.split.samples.prefetch(self.sampler.draw(*divmod(position, len(self.split))) for position in positions)


class EvalDataset(Dataset):
    """Evaluation samples by index, prepared by the image processor; `valid` is False for an unreadable image."""

    def __init__(self, split: Split, processor: Any, size: tuple[int, int], channels: int = 3):
        self.split, self.processor, self.size, self.channels = split, processor, size, channels
        self._reads_files = isinstance(processor, HfViTImageProcessor)  # transformers' take decoded images only

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.split.samples[index]
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
        return {**self._black, "label": label, "valid": False, "index": -1}

    @cached_property
    def _black(self) -> dict[str, Any]:
        height, width = self.size
        return self._pixels(Image.new("RGB" if self.channels == 3 else "L", (width, height)))


def collate_fn(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack samples into tensors: "image" (batch, height, width, channels) uint8, "label" and the other entries."""
    if not samples:
        return {}
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


def train_loader(
    split: Split,
    transform: TrainTransform,
    seed: int,
    layout: BatchLayout,
    steps: range,
    num_workers: int,
    class_sampling: str = "natural",
) -> Iterable[dict[str, torch.Tensor]]:
    """Return the training batches of this process for the steps in `steps`, one per forward."""
    if split.is_sharded and split.samples.holds_blocks and class_sampling == "natural":
        return BlockLoader(BlockDataset(split, transform, seed), layout, steps, num_workers)
    dataset = TrainDataset(split, transform, seed, class_sampling)
    return load_batches(dataset, StepBatchSampler(layout, steps), collate_fn, num_workers)


class BlockLoader:
    """Training batches of shards: the parts of all workers joined, with samples in the order of their positions."""

    def __init__(self, dataset: BlockDataset, layout: BatchLayout, steps: range, num_workers: int):
        self.parts = max(num_workers, 1)
        batches = BlockBatchSampler(layout, dataset.split.samples.sampler(dataset.seed), steps, self.parts)
        self.loader = load_batches(dataset, batches, collate_fn, num_workers, pin_memory=False)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        parts = iter(self.loader)
        for first in parts:
            rest = (next(parts) for _ in range(self.parts - 1))
            joined = [part for part in chain([first], rest) if part]
            order = torch.cat([part.pop("position") for part in joined]).argsort()
            batch = {name: torch.cat([part[name] for part in joined])[order] for name in joined[0]}
            pins = torch.cuda.is_available()
            yield {name: tensor.pin_memory() for name, tensor in batch.items()} if pins else batch


def load_batches(
    dataset: TrainDataset, batches: Any, collate_fn: Callable, num_workers: int, pin_memory: bool = True
) -> DataLoader:
    """Return a loader of training batches.

    Args:
        batches: batch sampler of positions.
        pin_memory: pin the memory of batches if there is a GPU.
    """
    options = {**_worker_options(dataset.split, num_workers), **({"prefetch_factor": 4} if num_workers else {})}
    pins = pin_memory and torch.cuda.is_available()
    return DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, pin_memory=pins, **options)


def eval_loader(dataset: EvalDataset, batch_size: int, processes: int, rank: int, num_workers: int) -> DataLoader:
    """Return this process's loader; over all processes, every sample comes once.

    The processes may have different numbers and sizes of batches. Workers persist between evaluations, because starting
    them takes time.
    """
    options = {**_worker_options(dataset.split, num_workers), "persistent_workers": num_workers > 0}
    if dataset.split.is_sharded:
        batches = consecutive_batches(len(dataset), processes, rank, max(num_workers, 1), batch_size)
        return DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, **options)
    mine = Subset(dataset, range(rank, len(dataset), processes))
    return DataLoader(mine, batch_size=batch_size, collate_fn=collate_fn, **options)


def _worker_options(split: Split, num_workers: int) -> dict[str, Any]:
    """Arguments of a DataLoader; workers are spawned where a thread of fsspec has connections, which a fork breaks."""
    options = worker_options(num_workers)
    if num_workers and split.is_sharded and split.samples.is_served_by_thread:
        options.setdefault("multiprocessing_context", "spawn")
    return options
