"""Datasets that decode and augment, and loaders of their batches; `samplers` has the order of the images."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..models.image_reading import ImageReadingError, read_image
from .augmentation import TrainTransform, sample_generator
from .samplers import BalancedSampler, BlockSampler, Sample, ShuffledSampler, StepBatchSampler
from .shards import ShardedDataset
from .splits import Split
from .workers import count_workers, worker_options


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

    def __getitem__(self, item: int | tuple[int, dict]) -> dict[str, Any]:
        """Return the sample at a position. `ReadAhead` gives the position with its undecoded sample."""
        position, read = item if isinstance(item, tuple) else (item, None)
        epoch, index = divmod(position, len(self.split))
        failure = None
        for skipped in range(len(self.split)):
            drawn = self.sampler.draw(epoch, (index + skipped * self.sampler.stride) % len(self.split))
            sample = self.split.samples[drawn.row] if read is None or skipped else read
            try:
                image, rng = self.split.image(sample, drawn.row), sample_generator(self.seed, drawn.epoch, drawn.row)
                augmented, label = self.transform.load(image, rng), self.split.label(sample)
            except ImageReadingError as error:
                self.split.log_unreadable(error)
                failure = error
                continue
            if self.split.label_column is not None and not self.split.multi_label and label < 0:  # of shards
                raise ValueError(f"an image of the training split has no label in the column {self.split.label_column}")
            return {**augmented, "label": label, "row": drawn.row, "skipped": skipped}
        raise ValueError(f"none of the {len(self.split)} images can be read: {failure}")

    def draw(self, position: int) -> Sample:
        """Return the row at a position."""
        return self.sampler.draw(*divmod(position, len(self.split)))


def channel_statistics(split: Split, num_channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each channel over a split's pixels in [0, 1].

    Of more than 1,000 images, 1,000 at equal distances are read. Unreadable images are left out.
    """
    counts, sums, squares = 0, np.zeros(num_channels), np.zeros(num_channels)
    for index in np.unique(np.linspace(0, len(split) - 1, min(len(split), 1000)).astype(int)):
        image = split.image(split.samples[int(index)], int(index))
        with suppress(ImageReadingError):
            pixels = read_image(image, num_channels, name=image["path"]).double().flatten(1) / 255
            counts += pixels.shape[1]
            sums += pixels.sum(dim=1).numpy()
            squares += pixels.square().sum(dim=1).numpy()
    if not counts:
        raise ValueError(f"none of the images can be read as {num_channels} channels")
    mean = sums / counts
    return mean, np.sqrt(np.maximum(squares / counts - mean**2, 1e-12))


def collate_fn(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack samples into tensors: "image" (batch, height, width, channels) uint8, "label" and the other entries.

    Images of different sizes are concatenated in "pixels"; "first" is the index of an image's first one.
    """
    names = [name for name in samples[0] if name != "pixels"]
    batch = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in names}
    if "pixels" in samples[0]:
        batch["pixels"] = torch.from_numpy(np.concatenate([sample["pixels"] for sample in samples]))
        counts = torch.tensor([len(sample["pixels"]) for sample in samples])
        batch["first"] = counts.cumsum(0) - counts
    return batch


def prefetch(batches: Iterator[Any], ahead: int = 2) -> Iterator[Any]:
    """Yield the items of an iterator that a thread advances, `ahead` items early."""
    end = object()
    pool = ThreadPoolExecutor(1, "batches")
    try:
        ready = deque(pool.submit(next, batches, end) for _ in range(ahead + 1))
        while (batch := ready.popleft().result()) is not end:
            ready.append(pool.submit(next, batches, end))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)


def train_loader(
    dataset: TrainDataset,
    batches: StepBatchSampler,
    num_workers: int | str,
    prefetch_factor: int = 4,
    timeout: float = 0,
    collate_fn: Callable = collate_fn,
) -> DataLoader:
    """Return the training batches of this process, one per forward.

    Args:
        batches: batch sampler of positions.
        num_workers: a number, or "auto"; see `count_workers`.
        prefetch_factor: batches that each worker loads ahead.
        timeout: seconds after which the loader raises RuntimeError if the workers deliver no batch; 0: never.
    """
    options = worker_options(count_workers(num_workers), dataset.split.needs_spawn)
    if options["num_workers"]:
        options |= {"prefetch_factor": prefetch_factor, "timeout": timeout}
    sampler = read_ahead(dataset.split, batches, dataset.draw)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, **options)


class TimedBatches:
    """Batches of a loader; `waited` is the time in seconds that was spent waiting for them so far."""

    def __init__(self, loader: Iterable[dict[str, torch.Tensor]]):
        self.waited = 0.0
        self._batches = iter(loader)

    def __next__(self) -> dict[str, torch.Tensor]:
        began = time.monotonic()
        batch = next(self._batches)
        self.waited += time.monotonic() - began
        return batch

    def close(self) -> None:
        """End the data workers."""
        del self._batches


class ReadAhead:
    """Batch sampler for shards that are read in blocks: adds its undecoded sample to each position or row.

    A thread of this process reads every block once, some batches ahead; data workers only decode.
    """

    def __init__(self, batches: Any, samples: ShardedDataset, draw: Callable[[int], Sample]):
        self.batches, self.samples, self.draw = batches, samples, draw

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, dict]]]:
        return prefetch(self._read())

    def _read(self) -> Iterator[list[tuple[int, dict]]]:
        drawn = ([(position, self.draw(position)) for position in batch] for batch in self.batches)
        for batch, following in pairwise(chain(drawn, [[]])):
            self.samples.prefetch(one for _, one in batch + following)
            yield [(position, self.samples.read(one)) for position, one in batch]


def read_ahead(split: Split, batches: Any, draw: Callable[[int], Sample]) -> Any:
    """Return batches of positions or rows, with their samples if the split is read in blocks."""
    return ReadAhead(batches, split.samples, draw) if split.in_blocks else batches
