"""Pictures of a run: learning curve, confusion matrix, and the first batch of training; in the style of report.html."""

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from ..files.output import new_file
from ..files.pages import page_color

PANELS = (("loss", "loss", "eval_loss"), ("accuracy", "accuracy", "eval_accuracy"))
MOST_CLASSES = 30  # of more, the names and numbers could not be read
_LONGEST = 24  # characters of a name
_TILE, _GAP = 144, 8  # pixels of an image of a batch, and between two
_SHADE = 0.75  # of a cell that holds all images of its row, as in report.html


def write_matrix(matrix: np.ndarray, names: Mapping[int, str], path: Path) -> None:
    """Draw a confusion matrix, where matplotlib is installed.

    Args:
        matrix: images with each label (rows) and prediction (columns), (classes, classes).
        names: the classes in that order, by class number.
    """
    if not find_spec("matplotlib"):
        return
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    shown = _shorten(names)
    inches = len(names) * (0.5 if len(names) <= 12 else 0.34)
    figure = Figure(figsize=(inches + 2.6, inches + 1.8), layout="constrained")
    axes = figure.subplots()
    shades = LinearSegmentedColormap.from_list("shades", [page_color("paper"), page_color("bar")])
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    axes.imshow(_SHADE * shares, cmap=shades, vmin=0, vmax=1)
    for (row, column), count in np.ndenumerate(matrix):
        text, color = (str(count), page_color("ink")) if count else ("·", page_color("soft"))
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=8 if count < 1000 else 6)
    places = range(len(names))
    axes.set_xticks(places, shown, rotation=90, parse_math=False)
    axes.set_yticks(places, shown, parse_math=False)
    axes.set_xticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.grid(True, which="minor", color=page_color("line"), lw=0.7, clip_on=False)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=page_color("ink"))
    axes.spines[:].set_visible(False)
    axes.set_xlabel("prediction", color=page_color("soft"))
    axes.set_ylabel("label", color=page_color("soft"))
    with new_file(path, overwrite=True) as file:
        figure.savefig(file, dpi=120, bbox_inches="tight")


def _shorten(names: Mapping[int, str]) -> list[str]:
    """The names as they fit on an axis; the number of a class whose letters the font lacks."""
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    return [
        (name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…")
        if all(font.get_char_index(ord(letter)) for letter in name)
        else f"class {number}"
        for number, name in names.items()
    ]


def points_of(history: Sequence[dict[str, Any]], training: str, held_out: str) -> dict[str, list[tuple[float, float]]]:
    """(optimiser step, value) of the lines "training" and "held out", which a history has under these names."""
    return {
        name: [(entry["step"], entry[key]) for entry in history if key in entry]
        for name, key in (("training", training), ("held out", held_out))
    }


def write_curve(history: list[dict], path: Path) -> None:
    """Draw the learning curve, if matplotlib is installed."""
    if not find_spec("matplotlib"):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    colors = {"training": page_color("soft"), "held out": page_color("bar")}  # as in report.html
    panels = (*PANELS, ("learning rate", "learning_rate", ""))
    for axes, (title, *names) in zip(figure.subplots(1, 3), panels, strict=True):
        for name, points in points_of(history, *names).items():
            if points:
                marker, width = ("o", 2.5) if name == "held out" else ("o" if len(points) == 1 else None, 1.5)
                axes.plot(*zip(*points, strict=True), label=name, color=colors[name], lw=width, marker=marker, ms=5)
        axes.set_xlim(left=0)
        axes.set_ylim(min(0, axes.dataLim.y0), 1.02 if title == "accuracy" else None)
        if title == "accuracy":
            axes.yaxis.set_major_formatter("{x:.0%}")
        axes.set_xlabel("optimiser step")
        axes.set_title(title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color=page_color("line"), lw=0.7)
        axes.set_axisbelow(True)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
    with new_file(path, overwrite=True) as file:
        figure.savefig(file, dpi=120)


def describe_target(target: np.ndarray, names: Sequence[str]) -> str:
    """Describe a target (num_labels,) of an image, which may be mixed from two: "cat", or "cat 0.83, dog 0.17"."""
    chosen = [int(number) for number in np.argsort(-target, kind="stable")[:3] if target[number] >= 0.1]
    if len(chosen) == 1:
        return names[chosen[0]]
    return ", ".join(f"{names[number]} {target[number]:.2g}" for number in chosen)


def join_patches(patches: np.ndarray, grid: Sequence[int], size: tuple[int, int], kept: Any = None) -> np.ndarray:
    """Put an image together from its patches; dropped ones are gray.

    Args:
        patches: (patches, patch height * patch width * channels) uint8, padded.
        grid: rows and columns of patches.
        size: height and width of a patch.
        kept: numbers of the patches that are not dropped, padded with -1; None: all.

    Returns:
        (height, width, channels)
    """
    patches = patches[: grid[0] * grid[1]].copy()
    if kept is not None:
        patches[np.setdiff1d(np.arange(len(patches)), kept.cpu().numpy())] = 128
    image = patches.reshape(*grid, *size, -1).swapaxes(1, 2)
    return image.reshape(grid[0] * size[0], grid[1] * size[1], -1)


def write_batch(images: Sequence[np.ndarray], captions: Sequence[str], path: Path) -> None:
    """Draw images of a batch side by side, each with its caption.

    Args:
        images: (height, width, 1 or 3) uint8 each.
    """
    columns, width = math.ceil(math.sqrt(len(images))), _TILE + _GAP
    rows, height = math.ceil(len(images) / columns), _TILE + _GAP + 16
    sheet = Image.new("RGB", (columns * width + _GAP, rows * height + _GAP), page_color("paper"))
    draw = ImageDraw.Draw(sheet)
    for number, (pixels, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(number, columns)
        left, top = column * width + _GAP, row * height + _GAP
        image = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
        scale = _TILE / max(image.size)
        size = [max(round(side * scale), 1) for side in image.size]
        sheet.paste(image.resize((size[0], size[1]), Image.Resampling.NEAREST if scale > 1 else None), (left, top))
        text = caption if len(caption) <= _LONGEST else caption[: _LONGEST - 1] + "…"
        draw.text((left, top + _TILE + 2), text, page_color("ink"))
    with new_file(path, overwrite=True) as file:
        sheet.save(file, "PNG")
