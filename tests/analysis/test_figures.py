"""Figures: drawn values, and text that is not cut off."""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.text import Text

from hf_vit import analysis
from hf_vit.analysis import figures

GENERATOR = np.random.default_rng(3)
COLOR = GENERATOR.random((40, 60, 3))


@pytest.fixture(scope="module")
def drawn() -> dict:
    similarity = GENERATOR.uniform(-1, 1, (9, 12, 9, 12))
    runs = [analysis.Run(f"model {index}", "CNN" if index % 2 else "ViT", 10**index, 70 + index) for index in range(4)]
    small = [run._replace(exaflops=run.exaflops / 1e9) for run in runs]
    powers = [(2.0**k, 3.0**k) for k in range(9)]
    return {
        "rollout": analysis.plot_attention_rollout(COLOR, GENERATOR.random((4, 6))),
        "rollout of a tall gray image": analysis.plot_attention_rollout(COLOR[..., 0].T, np.full((6, 4), 1 / 24)),
        "heads": analysis.plot_attention_maps(COLOR, GENERATOR.random((12, 4, 6)) / 24),
        "one head": analysis.plot_attention_maps(COLOR, GENERATOR.random((1, 4, 6)) / 24),
        "distance": analysis.plot_attention_distance(GENERATOR.random((24, 16)) * 100, images=128),
        "distance of one head": analysis.plot_attention_distance(np.array([[3.0], [0.0]])),
        "positions": analysis.plot_position_similarity(similarity),
        "positions in a row": analysis.plot_position_similarity(similarity[:1, :, :1]),
        "filters": analysis.plot_embedding_filters(GENERATOR.standard_normal((28, 3, 16, 16))),
        "filters of gray images": analysis.plot_embedding_filters(GENERATOR.standard_normal((3, 1, 4, 6))),
        "lines": analysis.plot_lines({"one": [(1e-3, 5.0), (0.01, 9.0)], "other": [(0.3, 2.0)]}, "rate", "%", "Title"),
        "lines over many places": analysis.plot_lines({"a": powers}, "images", "images a second", "A title", "xy"),
        "levels": analysis.plot_levels({"a long name of a level": [90.0, 95.0], "b": [50.0]}, "accuracy [%]", "Title"),
        "compute": analysis.plot_compute_accuracy(runs),
        "compute of small runs": analysis.plot_compute_accuracy(small),
        "compute of the paper": analysis.plot_compute_accuracy(analysis.published_runs()),
    }


@pytest.mark.slow
def test_no_text_is_cut_off(drawn):
    for name, figure in drawn.items():
        figure.draw_without_rendering()
        width, height = figure.canvas.get_width_height()
        hidden = labels_not_drawn(figure)
        for text in figure.findobj(Text):
            if text.get_visible() and text.get_text().strip():
                box = text.get_window_extent()
                inside = box.x0 > -1 and box.y0 > -1 and box.x1 < width + 1 and box.y1 < height + 1
                assert inside or text in hidden, f"{name}: {text.get_text()!r} at {box}"


def labels_not_drawn(figure) -> set[Text]:
    """Return the labels of ticks beyond the ends of an axis, and of axes that are switched off."""
    labels = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            away = [tick for tick in ticks if not (axes.axison and low <= tick.get_loc() <= high)]
            labels |= {label for tick in away for label in (tick.label1, tick.label2)}
    return labels


def test_names_of_points_do_not_cover_each_other(drawn):
    figure = drawn["compute of the paper"]
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 18
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def test_distance_shows_every_head_and_the_mean():
    distances = np.array([[1.0, 3.0], [5.0, 9.0], [2.0, 4.0]])
    heads, mean = analysis.plot_attention_distance(distances).axes[0].lines
    assert heads.get_ydata().tolist() == [1, 3, 5, 9, 2, 4]
    assert np.round(heads.get_xdata()).tolist() == [1, 1, 2, 2, 3, 3]
    assert mean.get_ydata().tolist() == [2, 7, 3]


def test_rollout_is_drawn_relative_to_its_mean():
    attention = np.array([[0.1, 0.2], [0.3, 0.4]])
    over = analysis.plot_attention_rollout(COLOR, attention).axes[1].images[1]
    np.testing.assert_allclose(over.get_array(), [[0.4, 0.8], [1.2, 1.6]])
    assert over.get_extent() == [-0.5, 59.5, 39.5, -0.5]
    outlier = np.ones((10, 10))
    outlier[0, 0] = 1000
    assert analysis.plot_attention_rollout(COLOR, outlier).axes[1].images[1].get_clim()[1] < 1


def test_position_maps_are_those_of_their_patches():
    similarity = np.arange(9 * 12 * 9 * 12).reshape(9, 12, 9, 12) / (9 * 12 * 9 * 12)
    figure = analysis.plot_position_similarity(similarity)
    tiles = [axes for axes in figure.axes if axes.images and axes.lines]
    assert len(tiles) == figures.MAX_TILES**2
    assert [tile.get_xlabel() for tile in tiles[-7:]] == ["1", "3", "5", "7", "8", "10", "12"]
    np.testing.assert_array_equal(tiles[-6].images[0].get_array(), similarity[8, 2])
    assert tiles[-6].lines[0].get_xydata().tolist() == [[2, 8]]


def test_filters_are_centered_on_gray():
    filters = np.zeros((2, 3, 4, 5))
    filters[0, 0, 1, 2] = -2.0
    filters[1, 2, 3, 4] = 0.5
    first, second = (axes.images[0].get_array() for axes in analysis.plot_embedding_filters(filters).axes)
    assert first[1, 2].tolist() == [0, 0.5, 0.5]
    assert second[3, 4].tolist() == [0.5, 0.5, 1]


def test_lines_go_through_their_points():
    lines = {"adam": [(0.001, 90.0), (0.003, 95.0)], "sgd": [(0.03, 80.0), (0.1, 85.0)]}
    figure = analysis.plot_lines(lines, "learning rate", "accuracy [%]", "A title")
    (axes,) = figure.axes
    drawn = {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.get_lines()}
    assert drawn == lines
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")


def test_levels_show_every_seed_and_the_mean():
    levels = {"none": [89.0, 90.5], "1d": [96.5, 97.0]}
    (axes,) = analysis.plot_levels(levels, "accuracy [%]", "A title").axes
    points, means = axes.get_lines()[::2], axes.get_lines()[1::2]
    assert [line.get_xdata().tolist() for line in points] == [*levels.values()]
    np.testing.assert_allclose([line.get_xdata()[0] for line in means], [np.mean(value) for value in levels.values()])
    assert [label.get_text() for label in axes.get_yticklabels()] == [*levels]
