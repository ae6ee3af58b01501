"""The confusion matrix of a few classes as a picture, in the style of report.html."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ..files.output import new_file
from ..files.pages import page_color

MOST_CLASSES = 30  # of more, the names and numbers could not be read
_LONGEST = 24  # characters of a name
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
