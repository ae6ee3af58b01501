"""Batch samplers: the sample positions of each batch, process and worker."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from .orders import LaneOrder

_IMBALANCE = 4 / 3  # largest ratio of the busiest worker's lanes to the mean; above it, workers share lanes


@dataclass(frozen=True)
class Shares:
    """Division of an optimiser step: batch_size = per_device * processes * accumulation."""

    batch_size: int
    per_device: int
    processes: int = 1
    rank: int = 0

    def __post_init__(self):
        if self.batch_size % (self.per_device * self.processes):
            raise ValueError(
                f"--batch-size ({self.batch_size}) is not a multiple of --per-device-batch-size ({self.per_device}) "
                f"x processes ({self.processes})"
            )

    @property
    def accumulation(self) -> int:
        """Number of forwards per process and optimiser step."""
        return self.batch_size // (self.per_device * self.processes)

    def micro_batch(self, forward: int) -> int:
        """Number, within the step, of this process's micro-batch in one forward."""
        return forward * self.processes + self.rank

    def positions(self, step: int, forward: int) -> range:
        """Sample positions of this process in one forward of one step."""
        start = step * self.batch_size + self.micro_batch(forward) * self.per_device
        return range(start, start + self.per_device)


class StepBatches:
    """Batch sampler: the positions of this process, one batch per forward, for a range of steps."""

    def __init__(self, shares: Shares, start_step: int, num_steps: int):
        self.shares, self.start_step, self.num_steps = shares, start_step, num_steps

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start_step, self.num_steps):
            for forward in range(self.shares.accumulation):
                yield list(self.shares.positions(step, forward))

    def __len__(self) -> int:
        return (self.num_steps - self.start_step) * self.shares.accumulation


class LaneBatches:
    """Batch sampler for shards that are read in blocks: for each forward, one list of positions per worker.

    The positions of a forward over all processes do not depend on the number of processes. Process r takes every
    position with position % processes == r. If the number of processes divides the number of lanes, each lane belongs
    to one process. If the lanes can also be shared evenly among the workers, each lane belongs to one worker.
    Otherwise several workers read the same blocks.
    """

    def __init__(self, shares: Shares, order: LaneOrder, steps: range, workers: int):
        self.shares, self.order, self.steps, self.workers = shares, order, steps, workers
        lanes, rest = divmod(order.lanes, shares.processes)
        self.by_lane = rest == 0 and -(-lanes // workers) * workers <= _IMBALANCE * lanes

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            for forward in range(self.shares.accumulation):
                parts: list[list[int]] = [[] for _ in range(self.workers)]
                for position in self._positions(step, forward):
                    parts[self._worker_of(position)].append(position)
                yield from parts

    def __len__(self) -> int:
        return len(self.steps) * self.shares.accumulation * self.workers

    def _positions(self, step: int, forward: int) -> range:
        together = self.shares.per_device * self.shares.processes
        start = step * self.shares.batch_size + forward * together
        return range(start + self.shares.rank, start + together, self.shares.processes)

    def _worker_of(self, position: int) -> int:
        place = position % self.order.size % self.order.lanes if self.by_lane else position
        return place // self.shares.processes % self.workers


class JoinedBatches:
    """Batches joined from the parts of all workers, with samples in the order of their positions."""

    def __init__(self, loader: Iterable[dict[str, torch.Tensor]], workers: int, pins_memory: bool):
        self.loader, self.workers, self.pins_memory = loader, workers, pins_memory

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        parts = iter(self.loader)
        for first in parts:
            rest = (next(parts) for _ in range(self.workers - 1))
            yield self._join([part for part in chain([first], rest) if part])

    def _join(self, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        order = torch.cat([part.pop("position") for part in parts]).argsort()
        batch = {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if self.pins_memory else batch


def runs_of_rows(length: int, processes: int, rank: int, workers: int, batch_size: int) -> list[list[int]]:
    """Return batches of row numbers that cover every row once over all processes.

    Each process, and each of its workers, reads consecutive rows. Batches of the workers alternate, because a
    DataLoader gives batches to its workers in turn.
    """
    runs = [_cut(_cut(range(length), processes, rank), workers, worker) for worker in range(workers)]
    turns = range(0, len(runs[0]), batch_size)
    return [list(run[begin : begin + batch_size]) for begin in turns for run in runs if begin < len(run)]


def _cut(rows: range, parts: int, number: int) -> range:
    """Return one of `parts` ranges of nearly equal length, the longer ones first."""
    length, longer = divmod(len(rows), parts)
    begin = number * length + min(number, longer)
    return rows[begin : begin + length + (number < longer)]
