"""Permutations without a table: every row once, and as random as NumPy's."""

import numpy as np
import pytest

from hf_vit.data import samplers
from hf_vit.data.samplers import BlockSampler, ShuffledSampler, permute


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 63, 64, 65, 1000, 4097, 2**16, 2**16 + 1, 3 * 2**15])
def test_permutation_is_complete_and_independent_of_batching(size):
    for seed in range(3):
        images = permute(np.arange(size), size, (seed, 1))
        assert sorted(images.tolist()) == list(range(size))
        some = np.random.default_rng(seed).integers(size, size=5)
        assert [permute(some[[n]], size, (seed, 1))[0] for n in range(5)] == images[some].tolist()


def statistics_of(order: np.ndarray) -> np.ndarray:
    """Differences from the expected values of a random permutation, in standard deviations."""
    size = len(order)
    steps = np.diff(order)
    mean_of_distances = (np.abs(order - np.arange(size)).mean() - size / 3) / (size * 0.3 / np.sqrt(size))
    neighbors = np.corrcoef(order[:-1], order[1:])[0, 1] * np.sqrt(size)
    left_in_place = ((order == np.arange(size)).sum() - 1) / 1
    followed = ((steps == 1).sum() - 1) / 1
    cells = [np.histogram2d(left, order[-len(left) :], bins=32)[0] for left in (np.arange(size), order[:-1])]
    chi = [((cell - cell.mean()) ** 2 / cell.mean()).sum() for cell in cells]
    return np.array([mean_of_distances, neighbors, left_in_place, followed, *((np.array(chi) - 1023) / np.sqrt(2046))])


def test_permutation_is_as_random_as_numpys():
    """Distances, neighbors, fixed points and two-dimensional counts of 20 permutations lie where NumPy's do."""
    size = 2**17 + 12_345
    ours = [statistics_of(permute(np.arange(size), size, (seed, 0))) for seed in range(10)]
    theirs = [statistics_of(np.random.default_rng(seed).permutation(size)) for seed in range(10)]
    assert np.abs(theirs).max() < 5  # the statistics are what they say
    assert np.abs(ours).max() < 5
    assert np.abs(np.mean(ours, axis=0) - np.mean(theirs, axis=0)).max() < 2  # sqrt(2 / 10) each: 4.5 deviations
    other_epoch = permute(np.arange(size), size, (0, 1))
    assert abs(np.corrcoef(permute(np.arange(size), size, (0, 0)), other_epoch)[0, 1]) * np.sqrt(size) < 5


def test_small_orders_are_unchanged_and_large_ones_need_no_table(monkeypatch):
    small = ShuffledSampler(1000, seed=7)
    recorded = np.random.default_rng((7, 3)).permutation(1000)
    assert small.rows(3, np.arange(1000)).tolist() == recorded.tolist()
    large = ShuffledSampler(13_000_000, seed=7)
    monkeypatch.setattr(samplers.np.random, "default_rng", None)  # of a table
    rows = large.rows(3, np.arange(4096))
    assert len(set(rows.tolist())) == 4096
    assert 0.4 < rows.mean() / 13_000_000 < 0.6


def lay_out(lengths: list[int], seed: int, epoch: int, lanes: int, window: int) -> list[int]:
    """Return an epoch of `BlockSampler`, computed from its definition."""
    first = np.cumsum(lengths) - lengths
    blocks = np.random.default_rng((seed, epoch)).permutation(len(lengths))
    sequence = [(place, first[block] + n) for place, block in enumerate(blocks) for n in range(lengths[block])]
    shares = [len(sequence) // lanes + (lane < len(sequence) % lanes) for lane in range(lanes)]
    columns = []
    for lane, share in enumerate(shares):
        mine, sequence = sequence[:share], sequence[share:]
        windows: dict[int, list[int]] = {}
        for place, row in mine:
            windows.setdefault((place - mine[0][0] + lane * window // lanes) // window, []).append(int(row))
        columns.append([])
        for number, rows in windows.items():
            order = np.random.default_rng((seed, epoch, lane, number)).permutation(len(rows))
            columns[-1] += [rows[n] for n in order]
    return [column[turn] for turn in range(shares[0]) for column in columns if turn < len(column)]


@pytest.mark.parametrize("lanes", [1, 2, 6, 12])
@pytest.mark.parametrize("window", [1, 3])
def test_lanes_follow_their_definition_from_any_index(lanes, window):
    lengths = np.random.default_rng(lanes).integers(1, 8, size=37)
    order = BlockSampler(lengths, seed=5, lanes=lanes, window=window)
    epochs = [lay_out(lengths.tolist(), 5, epoch, lanes, window) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(order.size)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    asked = np.random.default_rng(0).permutation(3 * order.size)
    for epoch, place in (divmod(int(position), order.size) for position in asked):
        row, visit, block = order.draw(epoch, place)
        assert (row, visit, block.lane) == (epochs[epoch][place], epoch, place % lanes)
        assert block.first <= row < block.end <= order.size


def test_rows_of_a_block_are_spread_over_the_epoch():
    """Sorted shards, as WebDataset tars of one class after the other, come out mixed."""
    order = BlockSampler(np.full(500, 20), seed=0, lanes=48, window=4)
    rows = np.array([order.draw(0, place).row for place in range(order.size)])
    for batch in rows[: 48 * 200].reshape(-1, 48):
        assert len(set((batch // 20).tolist())) == 48  # as many blocks as images
    classes = (rows // 1000)[:9984].reshape(-1, 256)  # of 10, in their order
    counts = np.stack([np.bincount(batch, minlength=10) for batch in classes])
    assert counts.std() < 2 * np.sqrt(256 * 0.09)  # twice what a full shuffle has
