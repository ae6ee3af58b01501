"""Orders of samples: random permutations, computed from a key and a place without any other state."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

_LARGEST_TABLE = 2**20  # 8 MB; longer permutations are computed place by place
_ROUNDS = 6


def permute(places: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Apply a random permutation of range(size) to some places, without a table of `size` entries.

    A Feistel network permutes a range of a power of two. A value outside range(size) goes through it again until it is
    inside (cycle walking), at most twice on average.

    Args:
        places: (number,) integers in range(size).
        key: key of the permutation, such as (seed, epoch).

    Returns:
        (number,) integers in range(size).
    """
    bits = max(int(size - 1).bit_length(), 2)
    round_keys = _round_keys(key)
    images = _mix_halves(places.astype(np.uint64), bits, round_keys)
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
    """Hash each number to 64 bits with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = values + np.full_like(values, round_key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class ShuffledOrder:
    """Permutation of all rows for each epoch: NumPy's up to a million rows, else `permute`."""

    stride = 1  # distance from the place of an unreadable image to that of its replacement

    def __init__(self, size: int, seed: int):
        self.size, self.seed = size, seed
        self._table: tuple[int, np.ndarray] = (-1, np.empty(0))

    def rows(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Row numbers at some places of an epoch, each from 0 to size - 1."""
        if self.size > _LARGEST_TABLE:
            return permute(places, self.size, (self.seed, epoch))
        if self._table[0] != epoch:
            self._table = (epoch, np.random.default_rng((self.seed, epoch)).permutation(self.size))
        return self._table[1][places]


class BalancedOrder:
    """Order in which each class comes equally often, whatever its number of images.

    The endless sequence of draws is cut into turns. A turn has every class once, in random order. A class gives its
    images in rounds: every image once, then all again in another order. Draw d is a function of (seed, d).

    Args:
        labels: (rows,) class numbers; rows with a number below 0 are never drawn.

    Raises:
        ValueError: no row has a label.
    """

    stride = 1

    def __init__(self, labels: np.ndarray, seed: int):
        self.size, self.seed = len(labels), seed
        self._rows = np.argsort(labels, kind="stable")[(labels < 0).sum() :]  # class by class
        classes, self._counts = np.unique(labels[self._rows], return_counts=True)
        if not len(classes):
            raise ValueError(f"cannot balance classes: none of the {len(labels)} images has a label")
        self._first = np.cumsum(self._counts) - self._counts

    def draw(self, epoch: int, place: int) -> tuple[int, int]:
        """Return the row at a place of an epoch, and how often it has come before."""
        turn, slot = divmod(epoch * self.size + place, len(self._counts))
        chosen = int(permute(np.array([slot]), len(self._counts), (self.seed, 0, turn))[0])
        visit, number = divmod(turn, int(self._counts[chosen]))
        number = int(permute(np.array([number]), int(self._counts[chosen]), (self.seed, 1 + chosen, visit))[0])
        return int(self._rows[self._first[chosen] + number]), visit


class Place(NamedTuple):
    """Row at one place of an epoch, and the rows of its block to read with it."""

    row: int
    lane: int
    window: tuple[int, int]  # (epoch, number within the lane); rows of an earlier window are no longer needed
    first: int  # first row of the block that is needed in this window
    end: int  # last such row, exclusive


class LaneOrder:
    """Shuffled order of rows in blocks, which reads every block once per epoch.

    The blocks are permuted for each epoch. Their rows, one block after another, are cut into lanes of equal length.
    Place p of the epoch is place p // lanes of lane p % lanes. Within a lane, the rows of `window` consecutive blocks
    are permuted together; the windows of different lanes begin at different times. A reader holds `window` blocks for
    each of its lanes. The order is a function of (seed, epoch, place).

    Args:
        lengths: (blocks,) number of rows of each block; rows are numbered block by block.
        lanes: number of lanes.
        window: number of blocks whose rows are shuffled together.
    """

    def __init__(self, lengths: np.ndarray, seed: int, lanes: int, window: int):
        self.size, self.seed, self.lanes, self.window = int(lengths.sum()), seed, lanes, window
        self.stride = lanes  # the replacement of an unreadable image comes from the same lane
        self._lengths = lengths
        self._first_rows = np.cumsum(lengths) - lengths
        self._epoch: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0), np.empty(0))
        self._tables: dict[int, tuple[tuple[int, int], np.ndarray]] = {}

    def rows(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Row numbers at some places of an epoch, each from 0 to size - 1."""
        return np.array([self.place(epoch, int(place)).row for place in places], np.int64)

    def place(self, epoch: int, place: int) -> Place:
        """Return the row at a place of an epoch; places are from 0 to size - 1."""
        blocks, starts = self._blocks_of(epoch)
        turn, lane = divmod(place, self.lanes)
        begin, end = self._bounds(lane), self._bounds(lane + 1)
        first_block = _block_at(starts, begin)
        ahead = lane * self.window // self.lanes  # number of blocks by which the first window is shorter
        number = (_block_at(starts, begin + turn) - first_block + ahead) // self.window
        block = first_block + number * self.window - ahead
        low = max(int(starts[max(block, first_block)]), begin)
        high = min(int(starts[min(block + self.window, len(blocks))]), end)
        chosen = low + int(self._table(lane, epoch, number, high - low)[begin + turn - low])
        block = _block_at(starts, chosen)
        shift = int(self._first_rows[blocks[block]] - starts[block])
        together = max(int(starts[block]), begin) + shift, min(int(starts[block + 1]), end) + shift
        return Place(chosen + shift, lane, (epoch, number), *together)

    def _bounds(self, lane: int) -> int:
        """First place of a lane; the first size % lanes of them are longer by one row."""
        length, longer = divmod(self.size, self.lanes)
        return lane * length + min(lane, longer)

    def _blocks_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks in the order of an epoch, and the first place of each, followed by the end."""
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


def _block_at(starts: np.ndarray, place: int) -> int:
    return int(np.searchsorted(starts, place, "right")) - 1
