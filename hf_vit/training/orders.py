"""Orders of samples: permutations that are functions of a key and a place, whatever was asked before."""

from functools import lru_cache

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
