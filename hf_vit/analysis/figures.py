"""Figures of the analyses; every function returns a `matplotlib.figure.Figure`.

Save it with `figure.savefig("name.png")`.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from ..files.versions import require
from .compute import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110
_HEADS, _MEAN = "#4878a8", "#c44e2b"
_SHORT_NAME = 14  # characters
_SIDES = ((5, 4), (5, -4), (-5, 4), (-5, -4))  # offsets of a point's name, in points
_CLIPPED = 98  # percentile where the scale of an overlay ends
MAX_TILES = 7  # position maps in a row or column, as in the paper


def plot_attention_rollout(image: np.ndarray, attention: np.ndarray, name: str = "Attention rollout") -> "Figure":
    """Draw an image, and attention on top of it (Figure 6 of arXiv 2010.11929).

    Args:
        image: (height, width, 3) or (height, width) in [0, 1], as the model gets it.
        attention: (rows, columns) of one image, from `attention_rollout` or `relevance`.
        name: title of the attention.

    Example:
        >>> import numpy as np
        >>> from hf_vit.analysis import plot_attention_rollout
        >>> figure = plot_attention_rollout(np.zeros((224, 224, 3)), np.ones((14, 14)) / 196)
        >>> figure.savefig("rollout.png")
    """
    height, width = image.shape[:2]
    figure = _figure(2 * 4.2 * width / height + 1.0, 4.5)
    left, right = figure.subplots(1, 2)
    left.set_title("Model input", fontsize=11)
    right.set_title(name, fontsize=11)
    left.imshow(image, cmap="gray", vmin=0, vmax=1)
    heat = _heat(right, attention / attention.mean(), image, interpolation="bicubic")
    for axes in (left, right):
        axes.set_axis_off()
    figure.colorbar(heat, ax=right, label="value / mean over patches", shrink=0.85, extend="max")
    return figure


def plot_attention_maps(image: np.ndarray, maps: np.ndarray, title: str = "") -> "Figure":
    """Draw the attention map of each head of one layer.

    Args:
        image: as in `plot_attention_rollout`.
        maps: (heads, rows, columns), such as `attention_maps(...)[0, -1]`.
        title: title of the figure.
    """
    columns = min(4, len(maps))
    rows = -(-len(maps) // columns)
    size = 2.5
    figure = _figure(columns * size * image.shape[1] / image.shape[0] + 1.0, rows * (size + 0.3) + 0.5)
    panels = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for axes in panels:
        axes.set_axis_off()
    for head, (axes, its_map) in enumerate(zip(panels, maps, strict=False)):
        heat = _heat(axes, 100 * its_map, image, scale=100 * maps, vmin=0)
        axes.set_title(f"head {head + 1}", fontsize=10)
    figure.colorbar(heat, ax=panels.tolist(), label="attention to the patch [%]", fraction=0.05, extend="max")
    figure.suptitle(title or "Attention of each head", fontsize=11)
    return figure


def plot_attention_distance(distances: np.ndarray, images: int | None = None) -> "Figure":
    """Draw the attention distance of each head against the depth (Figure 7, right, of arXiv 2010.11929).

    Args:
        distances: (layers, heads) in pixels, from `attention_distance`.
        images: number of images of the mean, for the title.
    """
    layers, heads = distances.shape
    figure = _figure(6.4, 4.0)
    axes = figure.subplots()
    depth = np.arange(1, layers + 1)
    spread = np.linspace(-0.12, 0.12, heads) if heads > 1 else np.zeros(1)
    axes.plot((depth[:, None] + spread).ravel(), distances.ravel(), ".", color=_HEADS, alpha=0.75, ms=9, label="a head")
    axes.plot(depth, distances.mean(axis=1), color=_MEAN, lw=1.5, label="mean of the heads")
    axes.set_xticks(depth if layers <= 16 else depth[1::2])
    axes.set_ylim(0, distances.max() * 1.08)
    axes.legend(frameon=False, loc="lower right")
    title = f"Attention distance of each head (images: {images:,})" if images else "Attention distance of each head"
    _describe(axes, "layer", "mean attention distance [pixels]", title)
    return figure


def plot_position_similarity(similarity: np.ndarray) -> "Figure":
    """Draw the similarity of position embeddings, one map for each patch (Figure 7, center, of arXiv 2010.11929).

    Args:
        similarity: (rows, columns, rows, columns), from `position_similarity`. Of a large grid, only some patches are
            drawn.
    """
    rows, columns = (  # at most MAX_TILES each, evenly spaced
        np.unique(np.linspace(0, size - 1, min(size, MAX_TILES)).round().astype(int)) for size in similarity.shape[:2]
    )
    tile = 0.72
    aspect = similarity.shape[1] / similarity.shape[0]
    figure = _figure(len(columns) * tile * aspect + 1.6, len(rows) * tile + 1.0)
    panels = figure.subplots(len(rows), len(columns), squeeze=False)
    lowest = min(similarity.min(), 0)
    for line, row in zip(panels, rows, strict=True):
        for axes, column in zip(line, columns, strict=True):
            heat = axes.imshow(similarity[row, column], vmin=lowest, vmax=1, cmap="viridis")
            axes.set(xticks=[], yticks=[])
            axes.plot(column, row, "+", color="white", ms=4, mew=0.8)
    for axes, column in zip(panels[-1], columns, strict=True):
        axes.set_xlabel(column + 1, fontsize=9)
    for axes, row in zip(panels[:, 0], rows, strict=True):
        axes.set_ylabel(row + 1, fontsize=9, rotation=0, ha="right", va="center")
    figure.supxlabel("column of the patch", fontsize=10)
    figure.supylabel("row of the patch", fontsize=10)
    figure.suptitle("Similarity of position embeddings", fontsize=11)
    figure.colorbar(heat, ax=panels.ravel().tolist(), label="cosine similarity", shrink=0.85)
    return figure


def plot_embedding_filters(filters: np.ndarray) -> "Figure":
    """Draw the principal components of the first filters (Figure 7, left, of arXiv 2010.11929).

    Each has its own scale, from minus to plus its largest magnitude; gray is zero. If there are not three channels, the
    mean over channels is drawn.

    Args:
        filters: (components, channels, height, width), from `embedding_filters`.
    """
    columns = min(7, len(filters))
    rows = -(-len(filters) // columns)
    figure = _figure(max(columns * 0.95, 3.0), rows * 0.95 + 0.5)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels:
        axes.set_axis_off()
    for axes, kernel in zip(panels, filters, strict=False):
        picture = kernel.transpose(1, 2, 0) if len(kernel) == 3 else kernel.mean(axis=0)
        axes.imshow(0.5 + picture / (2 * np.abs(picture).max() or 1), cmap="gray", vmin=0, vmax=1)
    figure.suptitle("Principal components of the filters", fontsize=11)
    return figure


def plot_compute_accuracy(runs: Sequence[Run], accuracy: str = "accuracy [%]") -> "Figure":
    """Draw accuracy against the compute of training (Figure 5 of arXiv 2010.11929); small runs in gigaFLOPs.

    Args:
        runs: from `read_runs` or `published_runs`, or made by hand.
        accuracy: label of the vertical axis.
    """
    scale, unit = (1e9, "gigaFLOPs") if max(run.exaflops for run in runs) < 1e-3 else (1, "exaFLOPs")
    runs = [run._replace(exaflops=scale * run.exaflops) for run in runs]
    figure = _figure(7.2, 4.6)
    axes = figure.subplots()
    for family, marker in zip(dict.fromkeys(run.family for run in runs), cycle("oDs^"), strict=False):
        points = [(run.exaflops, run.accuracy) for run in runs if run.family == family]
        axes.plot(*zip(*points, strict=True), marker, ms=6, label=family)
    axes.set_xscale("log")
    _name_ticks(axes.xaxis, [run.exaflops for run in runs])
    axes.margins(x=0.12, y=0.1)
    axes.legend(frameon=False, loc="lower right")
    _describe(axes, f"training compute [{unit}]", accuracy, "Accuracy against training compute")
    _name_points(figure, axes, runs)
    return figure


def plot_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str, title: str, logarithmic: str = "x"
) -> "Figure":
    """Draw named lines through points, such as accuracy against learning rates (Figures 4, 8 and 12 of the paper).

    Args:
        lines: name -> points (x, y), in the order in which they are connected.
        x_label, y_label, title: labels of the axes and the figure.
        logarithmic: axes with a logarithmic scale, a subset of "xy".
    """
    figure = _figure(7.2, 4.6)
    axes = figure.subplots()
    for (name, points), marker in zip(lines.items(), cycle("osD^v"), strict=False):
        axes.plot(*zip(*points, strict=True), marker=marker, lw=1.6, ms=6, label=name)
    if "x" in logarithmic:
        axes.set_xscale("log")
        _name_ticks(axes.xaxis, [x for points in lines.values() for x, _ in points])
    if "y" in logarithmic:
        axes.set_yscale("log")
        _name_ticks(axes.yaxis, [y for points in lines.values() for _, y in points])
    columns = len(lines) if max(map(len, lines)) <= _SHORT_NAME else 2
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9)  # below the axes
    _describe(axes, x_label, y_label, title)
    return figure


def plot_levels(levels: Mapping[str, Sequence[float]], label: str, title: str) -> "Figure":
    """Draw a row for each level of an option: every measurement as a point, and their mean.

    Args:
        levels: name -> values, one for each seed.
        label, title: labels of the horizontal axis and the figure.
    """
    figure = _figure(6.4, 0.42 * len(levels) + 1.3)
    axes = figure.subplots()
    for row, values in enumerate(levels.values()):
        axes.plot(values, [row] * len(values), "o", color=_HEADS, alpha=0.75, ms=7, label=None if row else "a seed")
        axes.plot(np.mean(values), row, "|", color=_MEAN, ms=16, mew=2.2, label=None if row else "mean")
    axes.set_yticks(range(len(levels)), list(levels))
    axes.set_ylim(len(levels) - 0.4, -0.6)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    _describe(axes, label, "", title)
    return figure


def _name_ticks(axis, values: Sequence[float]) -> None:
    """Label the powers of ten of a logarithmic axis, and 2 and 5 between them if there is room."""
    axis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    is_short = max(values) < 100 * min(values)
    axis.set_minor_formatter(lambda value, _: f"{value:,.4g}" if is_short and f"{value:.0e}"[0] in "25" else "")


def _name_points(figure: "Figure", axes, runs: Sequence[Run]) -> None:
    """Write names next to the points, each on the first of four sides where it covers no point and no other name."""
    figure.draw_without_rendering()  # computes all positions
    points = axes.transData.transform([(run.exaflops, run.accuracy) for run in runs])
    taken = [axes.get_legend().get_window_extent()]
    for run in runs:
        for side in _SIDES:
            across, along = "left" if side[0] > 0 else "right", "bottom" if side[1] > 0 else "top"
            text = axes.annotate(
                run.name, (run.exaflops, run.accuracy), side, textcoords="offset points", fontsize=7.5,
                color="#41464d", ha=across, va=along,
            )  # fmt: skip
            box = text.get_window_extent()
            if not (box.count_overlaps(taken) or box.count_contains(points)):
                break
            if side != _SIDES[-1]:
                text.remove()
        taken.append(box)


def _figure(width: float, height: float) -> "Figure":
    """Make a figure without pyplot, which would keep every figure and open windows."""
    require("matplotlib")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def _heat(axes, values: np.ndarray, image: np.ndarray, scale: np.ndarray | None = None, **options):
    """Draw values over the image in gray; the scale ends at a percentile, as few patches can have most attention."""
    scale = values if scale is None else scale
    gray = image if image.ndim == 2 else image @ np.array([0.299, 0.587, 0.114])
    axes.imshow(gray, cmap="gray", vmin=0, vmax=1)
    extent = (-0.5, image.shape[1] - 0.5, image.shape[0] - 0.5, -0.5)
    ends = {"vmin": scale.min(), "vmax": max(np.percentile(scale, _CLIPPED), scale.min() + 1e-6)}
    return axes.imshow(values, extent=extent, **{"cmap": "inferno", "alpha": 0.6, **ends, **options})


def _describe(axes, x_label: str, y_label: str, title: str) -> None:
    """Set the labels of a plot, and the style of all our plots."""
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#e6e8eb", lw=0.7)
    axes.set_axisbelow(True)
