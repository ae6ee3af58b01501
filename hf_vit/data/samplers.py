"""Which images come in which order, and which of them are a batch.

Training visits an endless sequence of positions: one epoch after another, each in its own order. Optimizer step s
takes the positions from s * batch_size to (s + 1) * batch_size; `BatchLayout` divides them among processes and
forwards. A sampler finds the row of the dataset at a position (`draw`), a batch sampler lists the positions of each
batch. Both are functions of the seed and the step alone, so a run can resume at any step, on any number of processes
and workers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_LARGEST_TABLE = 2**20  # 8 MB; longer permutations are computed index by index
_ROUNDS = 6
_BUCKETED_STEPS = 8  # optimizer steps whose images are bucketed together


class Block(NamedTuple):
    """Consecutive rows of shards that are read together."""

    lane: int
    window: tuple[int, int]  # (epoch, number within the lane); blocks of an earlier window are no longer needed
    first: int  # first row that is needed in this window
    end: int  # last such row, exclusive


class Sample(NamedTuple):
    """Row at one index of an epoch."""

    row: int
    epoch: int  # of this row: how often it has come before
    block: Block | None = None  # of a row of shards


class ShuffledSampler:
    """Permutation of all rows for each epoch: NumPy's up to a million rows, else `permute`."""

    stride = 1  # distance from the index of an unreadable image to that of its replacement

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed
        self._table: tuple[int, np.ndarray] = (-1, np.empty(0))

    def draw(self, epoch: int, index: int) -> Sample:
        """Return the row at an index of an epoch, from 0 to size - 1."""
        return Sample(int(self.rows(epoch, np.array([index]))[0]), epoch)

    def rows(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """Return the row numbers at some indices of an epoch."""
        if self.size > _LARGEST_TABLE:
            return permute(indices, self.size, (self.seed, epoch))
        if self._table[0] != epoch:
            self._table = (epoch, np.random.default_rng((self.seed, epoch)).permutation(self.size))
        return self._table[1][indices]


class BalancedSampler:
    """Order in which each class comes equally often, whatever its number of images.

    A round has every class once, in random order. Within a class, every image comes once before any comes again, in
    another order. Sample d of the endless sequence is a function of (seed, d).

    Args:
        labels: (rows,) class indices, one or more of 0 or above; rows with a number below 0 are never drawn.
    """

    stride = 1

    def __init__(self, labels: np.ndarray, seed: int):
        self.size, self.seed = len(labels), seed
        self._rows = np.argsort(labels, kind="stable")[(labels < 0).sum() :]  # class by class
        self._counts = np.unique(labels[self._rows], return_counts=True)[1]
        self._first = np.cumsum(self._counts) - self._counts

    def draw(self, epoch: int, index: int) -> Sample:
        """Return the row at an index of an epoch, from 0 to size - 1."""
        number, slot = divmod(epoch * self.size + index, len(self._counts))  # of the round
        chosen = int(permute(np.array([slot]), len(self._counts), (self.seed, 0, number))[0])
        count = int(self._counts[chosen])
        row_epoch, place = divmod(number, count)
        place = int(permute(np.array([place]), count, (self.seed, 1 + chosen, row_epoch))[0])
        return Sample(int(self._rows[self._first[chosen] + place]), row_epoch)


class BlockSampler:
    """Shuffled order of the rows of shards, in which every block is read once per epoch.

    The blocks are permuted for each epoch. Their rows, one block after another, are cut into lanes of equal length.
    Index p of the epoch is index p // lanes of lane p % lanes, so a batch takes rows from all lanes. Within a lane,
    the rows of `window` consecutive blocks are permuted together; the windows of different lanes begin at
    different times. A reader holds `window` blocks for each of its lanes. The order is a function of (seed, epoch,
    index).

    Five blocks of 4, 6, 3, 5 and 2 rows, with 2 lanes and a window of 2 blocks:

        place   0  1  2  3 | 4  5  6  7  8  9 |10 11 12 |13 14 15 16 17 |18 19
        block       0      |        1         |    2    |       3       |  4
        lane                0                 |              1
        window              0                 |    0    |          1

    The first window of lane 1 has one block less, so that the two lanes do not need new blocks at the same time.

    Args:
        lengths: (blocks,) number of rows of each block; rows are numbered block by block.
        lanes: number of lanes.
        window: number of blocks whose rows are shuffled together.
    """

    def __init__(self, lengths: np.ndarray, seed: int, lanes: int, window: int):
        self.size = int(lengths.sum())
        self.seed = seed
        self.lanes = lanes
        self.window = window
        self.stride = lanes  # the replacement of an unreadable image comes from the same lane
        self._lengths = lengths
        self._first_rows = np.cumsum(lengths) - lengths
        self._epoch: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0), np.empty(0))
        self._tables: dict[int, tuple[tuple[int, int], np.ndarray]] = {}

    def draw(self, epoch: int, index: int) -> Sample:
        """Return the row at an index of an epoch, from 0 to size - 1."""
        blocks, starts = self._blocks_of(epoch)
        offset, lane = divmod(index, self.lanes)
        lane_begin = self._lane_begin(lane)
        lane_end = self._lane_begin(lane + 1)
        place = lane_begin + offset

        # the window of the place
        lacking = lane * self.window // self.lanes  # blocks that the lane's first window has less
        lane_block = _block_at(starts, lane_begin)
        number = (_block_at(starts, place) - lane_block + lacking) // self.window
        first_block = lane_block + number * self.window - lacking
        end_block = min(first_block + self.window, len(blocks))
        begin = max(int(starts[max(first_block, lane_block)]), lane_begin)
        end = min(int(starts[end_block]), lane_end)

        # another place of that window, and its row
        drawn = begin + int(self._table(lane, epoch, number, end - begin)[place - begin])
        block = _block_at(starts, drawn)
        shift = int(self._first_rows[blocks[block]] - starts[block])  # from the block's places to its rows
        first_row = max(int(starts[block]), lane_begin) + shift
        end_row = min(int(starts[block + 1]), lane_end) + shift
        return Sample(drawn + shift, epoch, Block(lane, (epoch, number), first_row, end_row))

    def _lane_begin(self, lane: int) -> int:
        """Return the first place of a lane; the first `size % lanes` lanes have one row more than the others."""
        length, longer = divmod(self.size, self.lanes)
        return lane * length + min(lane, longer)

    def _blocks_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks in the order of an epoch, and the first index of each, followed by the end."""
        if self._epoch[0] != epoch:
            blocks = np.random.default_rng((self.seed, epoch)).permutation(len(self._lengths))
            starts = np.concatenate([[0], np.cumsum(self._lengths[blocks])])
            self._epoch = (epoch, blocks, starts)
        return self._epoch[1:]

    def _table(self, lane: int, epoch: int, number: int, size: int) -> np.ndarray:
        """Permutation of a window; the newest one of each lane is cached."""
        kept = self._tables.get(lane)
        if kept is None or kept[0] != (epoch, number):
            table = np.random.default_rng((self.seed, epoch, lane, number)).permutation(size).astype(np.int32)
            kept = self._tables[lane] = ((epoch, number), table)
        return kept[1]


def _block_at(starts: np.ndarray, index: int) -> int:
    return int(np.searchsorted(starts, index, "right")) - 1


@dataclass(frozen=True)
class BatchLayout:
    """Division of an optimizer step: batch_size = per_device * processes * accumulation."""

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
        """Number of forwards per process and optimizer step."""
        return self.batch_size // (self.per_device * self.processes)

    def micro_batch(self, forward: int) -> int:
        """Number, within the step, of this process's micro-batch in one forward."""
        return forward * self.processes + self.rank

    def samples(self, forward: int, interleave: bool = False) -> slice:
        """Return the part of a step's samples that this process computes in one forward.

        Args:
            interleave: deal the samples of a forward to the processes one by one.
        """
        if interleave:
            images = self.per_device * self.processes  # of all processes
            return slice(forward * images + self.rank, (forward + 1) * images, self.processes)
        begin = self.micro_batch(forward) * self.per_device
        return slice(begin, begin + self.per_device)


class StepBatchSampler:
    """Batch sampler: the positions of this process, one batch per forward, for a range of steps.

    Args:
        interleave: deal positions to the processes one by one. If the number of processes divides the number of lanes
            of a `BlockSampler`, each lane then belongs to one process.
    """

    def __init__(self, layout: BatchLayout, steps: range, interleave: bool = False):
        self.layout, self.steps, self.interleave = layout, steps, interleave

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            positions = self.positions(step)
            for forward in range(self.layout.accumulation):
                yield list(positions[self.layout.samples(forward, self.interleave)])

    def positions(self, step: int) -> range | list[int]:
        """Return the positions of an optimizer step, over all processes."""
        return range(step * self.layout.batch_size, (step + 1) * self.layout.batch_size)


class BucketBatchSampler(StepBatchSampler):
    """Batch sampler for images of different sizes; those of 8 optimizer steps are bucketed by number of patches.

    The images are sorted, cut into steps, and the order of the steps is drawn at random. Within a step, micro-batches
    are cut from the sorted images. The samples of a step depend on its number, not on the number of processes.

    Args:
        count_patches: returns the number of patches of the image at a position.
    """

    def __init__(self, layout: BatchLayout, steps: range, count_patches: Callable[[int], int], seed: int):
        super().__init__(layout, steps)
        self.count_patches, self.seed = count_patches, seed
        self._bucketed: tuple[int, np.ndarray] = (-1, np.empty(0))

    def positions(self, step: int) -> list[int]:
        number, index = divmod(step, _BUCKETED_STEPS)
        if self._bucketed[0] != number:
            size = _BUCKETED_STEPS * self.layout.batch_size
            positions = np.arange(number * size, (number + 1) * size)
            counts = [self.count_patches(int(position)) for position in positions]
            steps = positions[np.argsort(counts, kind="stable")].reshape(_BUCKETED_STEPS, -1)
            drawn = np.random.default_rng((self.seed, number)).permutation(_BUCKETED_STEPS)
            self._bucketed = (number, steps[drawn])
        return self._bucketed[1][index].tolist()


def permute(indices: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Apply a random permutation of range(size) to some indices, without a table of `size` entries.

    A Feistel network permutes a range of a power of two. A value outside range(size) goes through it again until it is
    inside (cycle walking), at most twice on average.

    Args:
        indices: (number,) integers in range(size).
        key: key of the permutation, such as (seed, epoch).

    Returns:
        (number,) integers in range(size).
    """
    bits = max(int(size - 1).bit_length(), 2)
    round_keys = _round_keys(key)
    images = _mix_halves(indices.astype(np.uint64), bits, round_keys)
    while (outside := np.flatnonzero(images >= size)).size:
        images[outside] = _mix_halves(images[outside], bits, round_keys)
    return images.astype(np.int64)


@lru_cache(8)
def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    return np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)


def _mix_halves(values: np.ndarray, bits: int, round_keys: np.ndarray) -> np.ndarray:
    """Permute numbers of `bits` bits: in each round, xor one half with a hash of the other half."""
    low_bits = bits // 2
    low_mask, high_mask = (np.uint64(2**width - 1) for width in (low_bits, bits - low_bits))
    high, low = values >> np.uint64(low_bits), values & low_mask
    for number, round_key in enumerate(round_keys):
        if number % 2:
            low = low ^ (_hash(high, round_key) & low_mask)
        else:
            high = high ^ (_hash(low, round_key) & high_mask)
    return (high << np.uint64(low_bits)) | low


def _hash(values: np.ndarray, round_key: np.uint64) -> np.ndarray:
    """Hash each number to 64 bits with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = values + np.full_like(values, round_key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
