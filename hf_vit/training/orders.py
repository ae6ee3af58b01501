"""Orders of samples: permutations that are functions of a key and a place, whatever was asked before."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

_LARGEST_TABLE = 2**20  # longer permutations are computed place by place; of this one NumPy's takes 8 MB
_ROUNDS = 6


def permute(places: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Images of some places under a random permutation of range(size); no table of `size` entries is made.

    A Feistel network permutes the next power of two; what falls outside of the range goes through it again until it
    falls inside (cycle walking), at most twice on average.

    Args:
        places: (number,) whole numbers of range(size).
        key: of the permutation, such as (seed, epoch).
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
    """Permute numbers of `bits` bits: each half in turn is changed by a hash of the other one, which can be undone."""
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
    """64 well-mixed bits of each number: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = values + np.full_like(values, round_key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class ShuffledOrder:
    """A permutation of all rows for each epoch.

    Up to a million rows it is NumPy's, from a table of the current epoch; beyond, `permute`, without one.
    """

    stride = 1  # from the place of an unreadable image to that of the one which stands in for it

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
    """An order in which each class comes as often as any other, whatever its number of images.

    The endless sequence of draws is cut into turns, each of which has every class once, in an order of its own. A class
    gives its images in rounds: every image once before any comes again. So draw d is a function of (seed, d).

    Args:
        labels: (rows,) class numbers; rows with one below 0 are never drawn.

    Raises:
        ValueError: no row has a label.
    """

    stride = 1

    def __init__(self, labels: np.ndarray, seed: int):
        self.size, self.seed = len(labels), seed
        self._rows = np.argsort(labels, kind="stable")[(labels < 0).sum() :]  # class by class
        classes, self._counts = np.unique(labels[self._rows], return_counts=True)
        if not len(classes):
            raise ValueError(f"none of the {len(labels)} images has a label to balance")
        self._first = np.cumsum(self._counts) - self._counts

    def draw(self, epoch: int, place: int) -> tuple[int, int]:
        """The row at a place of an epoch, and how often that row has come before."""
        turn, slot = divmod(epoch * self.size + place, len(self._counts))
        chosen = int(permute(np.array([slot]), len(self._counts), (self.seed, 0, turn))[0])
        visit, number = divmod(turn, int(self._counts[chosen]))
        number = int(permute(np.array([number]), int(self._counts[chosen]), (self.seed, 1 + chosen, visit))[0])
        return int(self._rows[self._first[chosen] + number]), visit


class Place(NamedTuple):
    """One row at its place in an epoch, and what may be read with it."""

    row: int
    lane: int
    window: tuple[int, int]  # (epoch, number within the lane): when it changes, what was read for the lane is used up
    first: int  # the rows from here
    end: int  # to here, exclusive, are needed in the same window; they lie in one block


class LaneOrder:
    """An order of rows that lie in blocks, each of which is read at once: a shuffle that reads every block once.

    The blocks are permuted for each epoch, and the rows of all of them, one block after another, are cut into lanes of
    equal length. Place p of the epoch is place p // lanes of lane p % lanes. Within a lane, the rows of `window` blocks
    in a row are permuted together; windows of different lanes begin at different times. So a reader that serves some
    lanes holds `window` blocks for each. All of it is a function of (seed, epoch, place).

    Args:
        lengths: (blocks,) rows of each block; rows are numbered block by block.
    """

    def __init__(self, lengths: np.ndarray, seed: int, lanes: int, window: int):
        self.size, self.seed, self.lanes, self.window = int(lengths.sum()), seed, lanes, window
        self.stride = lanes  # a stand-in for an unreadable image comes from the same lane
        self._lengths = lengths
        self._first_rows = np.cumsum(lengths) - lengths
        self._epoch: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0), np.empty(0))
        self._tables: dict[int, tuple[tuple[int, int], np.ndarray]] = {}

    def rows(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Row numbers at some places of an epoch, each from 0 to size - 1."""
        return np.array([self.place(epoch, int(place)).row for place in places], np.int64)

    def place(self, epoch: int, place: int) -> Place:
        """The row at a place of an epoch, from 0 to size - 1."""
        blocks, starts = self._blocks_of(epoch)
        turn, lane = divmod(place, self.lanes)
        begin, end = self._bounds(lane), self._bounds(lane + 1)
        first_block = _block_at(starts, begin)
        ahead = lane * self.window // self.lanes  # blocks by which its first window is shorter
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
        """Where a lane begins; the first size % lanes of them are longer by one row."""
        length, longer = divmod(self.size, self.lanes)
        return lane * length + min(lane, longer)

    def _blocks_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks in the order of an epoch, and where in it each begins, with its end."""
        if self._epoch[0] != epoch:
            blocks = np.random.default_rng((self.seed, epoch)).permutation(len(self._lengths))
            starts = np.concatenate([[0], np.cumsum(self._lengths[blocks])])
            self._epoch = (epoch, blocks, starts)
        return self._epoch[1:]

    def _table(self, lane: int, epoch: int, number: int, size: int) -> np.ndarray:
        """The permutation of a window; of each lane the newest is kept."""
        kept = self._tables.get(lane)
        if kept is None or kept[0] != (epoch, number):
            table = np.random.default_rng((self.seed, epoch, lane, number)).permutation(size).astype(np.int32)
            kept = self._tables[lane] = ((epoch, number), table)
        return kept[1]


def _block_at(starts: np.ndarray, place: int) -> int:
    return int(np.searchsorted(starts, place, "right")) - 1
