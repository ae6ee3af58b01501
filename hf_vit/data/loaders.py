"""Data sets that decode and augment, and loaders of their batches; `samplers` has the order of the images."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, pairwise
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset

from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.image_reading import ImageReadingError, load_image, read_image, to_mode
from .augmentation import TrainTransform, sample_generator
from .samplers import BalancedSampler, BlockSampler, Draw, ShuffledSampler, StepBatchSampler
from .shards import ShardedDataset
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

    def __getitem__(self, item: int | tuple[int, dict]) -> dict[str, Any]:
        """Return the sample at a position. `ReadAhead` gives the position with its undecoded sample."""
        position, read = item if isinstance(item, tuple) else (item, None)
        epoch, index = divmod(position, len(self.split))
        failure = None
        for skipped in range(len(self.split)):
            drawn = self.sampler.draw(epoch, (index + skipped * self.sampler.stride) % len(self.split))
            sample = self.split.samples[drawn.row] if read is None or skipped else read
            try:
                image, rng = self.split.image(sample, drawn.row), sample_generator(self.seed, drawn.visit, drawn.row)
                augmented, label = self.transform.load(image, rng), self.split.label(sample)
            except ImageReadingError as error:
                self.split.log_unreadable(error)
                failure = error
                continue
            if self.split.label_column is not None and not self.split.multi_label and label < 0:  # of shards
                raise ValueError(f"an image of the training split has no label in the column {self.split.label_column}")
            return {**augmented, "label": label, "row": drawn.row, "skipped": skipped}
        raise ValueError(f"none of the {len(self.split)} images can be read: {failure}")

    def draw(self, position: int) -> Draw:
        """Return the row at a position."""
        return self.sampler.draw(*divmod(position, len(self.split)))


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

    def __getitem__(self, item: int | tuple[int, dict]) -> dict[str, Any]:
        index, sample = item if isinstance(item, tuple) else (item, self.split.samples[item])
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
    collate_fn: Callable = collate_fn,
) -> DataLoader:
    """Return the training batches of this process, one per forward.

    Args:
        batches: batch sampler of positions.
        num_workers: a number, or "auto"; see `count_workers`.
        prefetch_factor: batches that each worker loads ahead.
    """
    options = _worker_options(dataset.split, count_workers(num_workers))
    if options["num_workers"]:
        options["prefetch_factor"] = prefetch_factor
    sampler = _read_ahead(dataset, batches, dataset.draw)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, **options)


def eval_loader(dataset: EvalDataset, batch_size: int, processes: int, rank: int, num_workers: int | str) -> DataLoader:
    """Return this process's loader; over all processes, every sample comes once.

    The processes may have different numbers and sizes of batches. Workers persist between evaluations, because starting
    them takes time.
    """
    options = _worker_options(dataset.split, count_workers(num_workers))
    options["persistent_workers"] = options["num_workers"] > 0
    rows = range(rank, len(dataset), processes)
    if dataset.split.is_sharded:  # a block has consecutive rows
        rows = range(len(dataset) * rank // processes, len(dataset) * (rank + 1) // processes)
    batches = _read_ahead(dataset, BatchSampler(rows, batch_size, drop_last=False), lambda row: Draw(row, 0))
    return DataLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, **options)


class ReadAhead:
    """Batch sampler for shards that are read in blocks: adds its undecoded sample to each position or row.

    A thread of this process reads every block once, some batches ahead; data workers only decode.
    """

    def __init__(self, batches: Any, samples: ShardedDataset, draw: Callable[[int], Draw]):
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


def _read_ahead(dataset: Any, batches: Any, draw: Callable[[int], Draw]) -> Any:
    """Return `batches`, with their samples if they are read in blocks."""
    return ReadAhead(batches, dataset.split.samples, draw) if dataset.split.in_blocks else batches


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
            texts = [(_CGROUP / file).read_text(encoding="ascii") for file in files]
            quota, period = map(int, " ".join(texts).split())
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
    options: dict[str, Any] = {"num_workers": num_workers, "worker_init_fn": _init_worker}
    options["pin_memory"] = torch.cuda.is_available()
    if _uses_server(num_workers):
        options["multiprocessing_context"] = "forkserver"
    elif num_workers and split.is_sharded and split.samples.uses_event_loop:
        options["multiprocessing_context"] = "spawn"
    return options


def _init_worker(worker: int) -> None:
    """Leave the process group, and end with the training process, even while waiting for the rest of a batch."""
    leave_process_group(worker)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)
