"""Data sets that decode and augment, and loaders of their batches; `samplers` has the order of the images."""

import math
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate, islice
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset

from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.image_reading import ImageReadingError, load_image, read_image, to_mode
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

_CGROUP = Path("/sys/fs/cgroup")
_MOST_WORKERS = 16  # of "auto": each holds several batches in memory


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
        epoch, index = divmod(position, len(self.split))
        failure = None
        for skipped in range(len(self.split)):
            drawn = self.sampler.draw(epoch, (index + skipped * self.sampler.stride) % len(self.split))
            sample = self.split.samples[drawn.row] if drawn.block is None else self.split.samples.read(drawn)
            try:
                image, rng = self.split.image(sample, drawn.row), sample_generator(self.seed, drawn.visit, drawn.row)
                augmented, label = self.augment(image, rng), self.split.label(sample)
            except ImageReadingError as error:
                self.split.log_unreadable(error)
                failure = error
                continue
            if self.split.label_column is not None and not self.split.multi_label and label < 0:  # of shards
                raise ValueError(f"an image of the training split has no label in the column {self.split.label_column}")
            return {**augmented, "label": label, "row": drawn.row, "skipped": skipped}
        raise ValueError(f"none of the {len(self.split)} images can be read: {failure}")

    def augment(self, image: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the sample's "image" and other entries.

        Raises:
            ImageReadingError: the image cannot be read.
        """
        if not self.transform.reduced_decoding:
            return self.transform.sample(self.transform.read(image), rng)
        drawn: list[tuple[Box, int, int]] = []

        def reduce_to(height: int, width: int) -> tuple[int, int]:
            """Return the image size at which the crop is as large as the result."""
            box = self.transform.sample_box(height, width, rng)
            drawn.append((box, height, width))
            rows, columns = self.transform.size
            return math.ceil(height * rows / box.height), math.ceil(width * columns / box.width)

        decoded = load_image(image, reduce_to, image["path"])
        box, height, width = drawn[0]
        return self.transform.sample(decoded, rng, box.scaled(decoded.height / height, decoded.width / width))


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
    """Evaluation samples by index, prepared by the image processor; `valid` is False for an unreadable image.

    If the processor rounds its resize (`has_levels`), images are uint8 and not yet normalized.
    """

    def __init__(self, split: Split, processor: Any, size: tuple[int, int], channels: int = 3):
        self.split, self.processor, self.size, self.channels = split, processor, size, channels
        self._reads_files = isinstance(processor, HfViTImageProcessor)  # transformers' take decoded images only
        settings: dict[str, Any] = processor.settings() if self._reads_files else {}
        steps = all(settings.get(step) for step in ("do_resize", "do_rescale", "do_normalize"))
        self.has_levels = steps and settings["resize_output"] != "float" and settings["preset"] != "native"

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
        options: dict[str, Any] = {"padding": "max_num_patches"} if is_native else {}  # all samples have one shape
        if self.has_levels:
            options = {"rescale_factor": 1.0, "do_normalize": False}
        entries = {name: values[0] for name, values in self.processor(image, return_tensors="np", **options).items()}
        pixels = entries.pop("pixel_values")
        return {"image": pixels.astype(np.uint8) if self.has_levels else pixels, **entries}

    def padding(self) -> dict[str, Any]:
        """Return a padding sample, with index -1."""
        label = np.zeros(self.split.num_labels, np.float32) if self.split.multi_label else -1
        height, width = self.size
        black = Image.new("RGB" if self.channels == 3 else "L", (width, height))
        return {**self._pixels(black), "label": label, "valid": False, "index": -1}


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
    if not samples:
        return {}
    names = [name for name in samples[0] if name != "pixels"]
    batch = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in names}
    if "pixels" in samples[0]:
        batch["pixels"] = torch.from_numpy(np.concatenate([sample["pixels"] for sample in samples]))
        counts = torch.tensor([len(sample["pixels"]) for sample in samples])
        batch["first"] = counts.cumsum(0) - counts
    return batch


def train_loader(
    split: Split,
    transform: TrainTransform,
    seed: int,
    layout: BatchLayout,
    steps: range,
    num_workers: int | str,
    class_sampling: str = "natural",
    prefetch_factor: int = 4,
) -> Iterable[dict[str, torch.Tensor]]:
    """Return the training batches of this process for the steps in `steps`, one per forward.

    Args:
        num_workers: a number, or "auto"; see `count_workers`.
        prefetch_factor: batches that each worker loads ahead.
    """
    if split.is_sharded and split.samples.holds_blocks and class_sampling == "natural":
        return BlockLoader(BlockDataset(split, transform, seed), layout, steps, num_workers, prefetch_factor)
    dataset = TrainDataset(split, transform, seed, class_sampling)
    return load_batches(dataset, StepBatchSampler(layout, steps), collate_fn, num_workers, prefetch_factor)


class BlockLoader:
    """Training batches of shards: the parts of all workers joined, with samples in the order of their positions.

    With workers, a thread joins the parts and pins the batches, so that the training thread finds them ready.
    """

    def __init__(
        self, dataset: BlockDataset, layout: BatchLayout, steps: range, num_workers: int | str, prefetch_factor: int
    ):
        self.num_workers = count_workers(num_workers)
        self.parts = max(self.num_workers, 1)
        batches = BlockBatchSampler(layout, dataset.split.samples.sampler(dataset.seed), steps, self.parts)
        self.loader = load_batches(dataset, batches, collate_fn, self.num_workers, prefetch_factor, pin_memory=False)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        parts = iter(self.loader)  # here, because torch reports a dead worker to the thread that starts them
        joined = (join_parts([first, *islice(parts, self.parts - 1)]) for first in parts)
        return prefetch(joined) if self.num_workers else joined


def join_parts(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join the parts of a batch, sorted by "position", in pinned memory if there is a GPU; each is copied once."""
    parts = [part for part in parts if part]
    order = torch.cat([part["position"] for part in parts]).argsort().argsort()
    parts_of_order = order.split([len(part["position"]) for part in parts])
    pins = torch.cuda.is_available()
    batch = {}
    for name, tensor in parts[0].items():
        columns = [part[name] for part in parts]
        length = sum(map(len, columns))
        batch[name] = torch.empty((length, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pins)
        if name == "pixels":  # not stacked; "first" has the offsets
            torch.cat(columns, out=batch[name])
            continue
        if name == "first":
            begins = accumulate((len(part["pixels"]) for part in parts), initial=0)
            columns = [first + begin for first, begin in zip(columns, begins, strict=False)]
        for column, chosen in zip(columns, parts_of_order, strict=True):
            batch[name].index_copy_(0, chosen, column)
    del batch["position"]
    return batch


def prefetch(batches: Iterator[Any], ahead: int = 2) -> Iterator[Any]:
    """Yield the items of an iterator that a thread advances, `ahead` items early."""
    end = object()
    # One torch thread there, so that the copies do not compete with training.
    pool = ThreadPoolExecutor(1, "batches", initializer=torch.set_num_threads, initargs=(1,))
    try:
        ready = deque(pool.submit(next, batches, end) for _ in range(ahead + 1))
        while (batch := ready.popleft().result()) is not end:
            ready.append(pool.submit(next, batches, end))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)


def load_batches(
    dataset: TrainDataset,
    batches: Any,
    collate_fn: Callable,
    num_workers: int | str,
    prefetch_factor: int = 4,
    pin_memory: bool = True,
) -> DataLoader:
    """Return a loader of training batches.

    Args:
        batches: batch sampler of positions.
        pin_memory: pin the memory of batches, in a thread, if there is a GPU.
    """
    options = _worker_options(dataset.split, count_workers(num_workers))
    if options["num_workers"]:
        options["prefetch_factor"] = prefetch_factor
    pins = pin_memory and torch.cuda.is_available()
    return DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, pin_memory=pins, **options)


def eval_loader(dataset: EvalDataset, batch_size: int, processes: int, rank: int, num_workers: int | str) -> DataLoader:
    """Return this process's loader; over all processes, every sample comes once.

    The processes may have different numbers and sizes of batches. Workers persist between evaluations, because starting
    them takes time.
    """
    num_workers = count_workers(num_workers)
    options = {**_worker_options(dataset.split, num_workers), "persistent_workers": num_workers > 0}
    options["pin_memory"] = torch.cuda.is_available()
    if dataset.split.is_sharded:
        batches = consecutive_batches(len(dataset), processes, rank, max(num_workers, 1), batch_size)
        return DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, **options)
    mine = Subset(dataset, range(rank, len(dataset), processes))
    return DataLoader(mine, batch_size=batch_size, collate_fn=collate_fn, **options)


def count_workers(num_workers: int | str) -> int:
    """Return the number of data workers; "auto": this process's share of the processors, less one, from 1 to 16."""
    if num_workers != "auto":
        return int(num_workers)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return min(max(count_processors() // processes - 1, 1), _MOST_WORKERS)


def count_processors() -> int:
    """Number of processors that this process may use: by its affinity and by the quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # cgroups 2 and 1
        with suppress(OSError, ValueError):  # such as "max", without a quota
            quota, period = map(int, " ".join((_CGROUP / file).read_text(encoding="ascii") for file in files).split())
            if quota > 0:
                count = min(count, max(quota // period, 1))
    return count


def leave_process_group(worker: int) -> None:
    """Take a data worker out of its training process's group, so that signals to the group do not reach it."""
    if hasattr(os, "setsid"):
        os.setsid()


def _uses_server(num_workers: int) -> bool:
    """Tell whether workers are forked from a server: a process group (gloo, NCCL) has threads."""
    return bool(num_workers) and dist.is_initialized() and "forkserver" in multiprocessing.get_all_start_methods()


def start_server(num_workers: int | str) -> None:
    """Start the forkserver of the data workers, if they use one; its imports take seconds, on another core."""
    if _uses_server(count_workers(num_workers)):
        forkserver.set_forkserver_preload(["__main__", f"{__package__}.worker_server"])
        forkserver.ensure_running()


def _worker_options(split: Split, num_workers: int) -> dict[str, Any]:
    """Return the arguments of a DataLoader with workers, the processes that decode and augment.

    A worker forked while threads run can deadlock on a lock that a thread held. With a process group, workers are
    therefore forked from a server without threads, which has imported everything once. Where a thread of fsspec has
    connections, which a fork breaks, they are spawned.
    """
    options: dict[str, Any] = {"num_workers": num_workers, "worker_init_fn": leave_process_group}
    if _uses_server(num_workers):
        options |= {"multiprocessing_context": "forkserver", "worker_init_fn": _init_worker}
    elif num_workers and split.is_sharded and split.samples.uses_event_loop:
        options["multiprocessing_context"] = "spawn"
    return options


def _init_worker(worker: int) -> None:
    """Leave the process group, and end with the training process; the server lives as long as its workers."""
    leave_process_group(worker)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)
