"""Permutations without a table: every row once, and as random as NumPy's."""

import numpy as np
import pytest

from hf_vit.training import orders
from hf_vit.training.orders import ShuffledOrder, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 63, 64, 65, 1000, 4097, 2**16, 2**16 + 1, 3 * 2**15])
def test_every_number_comes_once_and_alone_as_together(size):
    for seed in range(3):
        images = permute(np.arange(size), size, (seed, 1))
        assert sorted(images.tolist()) == list(range(size))
        some = np.random.default_rng(seed).integers(size, size=5)
        assert [permute(some[[n]], size, (seed, 1))[0] for n in range(5)] == images[some].tolist()


def statistics_of(order: np.ndarray) -> np.ndarray:
    """Standard deviations from what is expected of a random permutation."""
    size = len(order)
    steps = np.diff(order)
    mean_of_distances = (np.abs(order - np.arange(size)).mean() - size / 3) / (size * 0.3 / np.sqrt(size))
    neighbours = np.corrcoef(order[:-1], order[1:])[0, 1] * np.sqrt(size)
    left_in_place = ((order == np.arange(size)).sum() - 1) / 1
    followed = ((steps == 1).sum() - 1) / 1
    cells = [np.histogram2d(left, order[-len(left) :], bins=32)[0] for left in (np.arange(size), order[:-1])]
    chi = [((cell - cell.mean()) ** 2 / cell.mean()).sum() for cell in cells]
    return np.array([mean_of_distances, neighbours, left_in_place, followed, *((np.array(chi) - 1023) / np.sqrt(2046))])


def test_it_is_as_random_as_numpys():
    """Distances, neighbours, fixed points and two-dimensional counts of 20 permutations lie where NumPy's do."""
    size = 2**17 + 12_345
    ours = [statistics_of(permute(np.arange(size), size, (seed, 0))) for seed in range(10)]
    theirs = [statistics_of(np.random.default_rng(seed).permutation(size)) for seed in range(10)]
    assert np.abs(theirs).max() < 5  # the statistics are what they say
    assert np.abs(ours).max() < 5
    assert np.abs(np.mean(ours, axis=0) - np.mean(theirs, axis=0)).max() < 2  # sqrt(2 / 10) each: 4.5 deviations
    other_epoch = permute(np.arange(size), size, (0, 1))
    assert abs(np.corrcoef(permute(np.arange(size), size, (0, 0)), other_epoch)[0, 1]) * np.sqrt(size) < 5


def test_small_sets_keep_the_order_of_recorded_runs_and_large_ones_need_no_table(monkeypatch):
    small = ShuffledOrder(1000, seed=7)
    recorded = np.random.default_rng((7, 3)).permutation(1000)
    assert small.rows(3, np.arange(1000)).tolist() == recorded.tolist()
    large = ShuffledOrder(13_000_000, seed=7)
    monkeypatch.setattr(orders.np.random, "default_rng", None)  # of a table
    rows = large.rows(3, np.arange(4096))
    assert len(set(rows.tolist())) == 4096
    assert 0.4 < rows.mean() / 13_000_000 < 0.6
