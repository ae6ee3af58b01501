"""Contact sheets: pages of images with captions."""

import math
import textwrap
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..files.output import new_file
from ..files.versions import require
from ..models.image_reading import ImageReadingError, read_for_display

COLUMNS, ROWS = 12, 8
_LINE_LENGTH = 17  # characters of a name that fit above its image, even if all are wide
_THUMBNAIL = 320  # largest number of pixels of the longer side, approximately


def draw_contact_sheet(images: list, labels: np.ndarray, predictions: np.ndarray, path: Path) -> Path:
    """Draw the wrong images, framed in red with the right label, then right ones, up to a full page.

    Args:
        images: PIL images or arrays, (number,).
        labels, predictions: class numbers, (number,).
    """
    order = np.argsort(labels == predictions, kind="stable")[: COLUMNS * ROWS]
    wrong = labels[order] != predictions[order]
    titles = [f"{predictions[index]}, is {labels[index]}" if bad else str(predictions[index])
              for index, bad in zip(order, wrong, strict=True)]  # fmt: skip
    accuracy = (labels == predictions).mean()
    heading = f"{len(labels)} held-out digits, accuracy {accuracy:.2%}; misclassified digits first, in red"
    _draw([images[index] for index in order], titles, wrong, path, heading, (ROWS, COLUMNS), (0.9, 1.05))
    return path


def draw_neighbors(query: Any, found: Sequence[tuple[Any, str, float]], path: Path) -> Path:
    """Draw a query image, framed, and the similar images with their cosines.

    Args:
        query: an input of `read_image`.
        found: (image, name, cosine), most similar first; an unreadable image leaves an empty tile.
        path: file to write.
    """
    shown = found[: COLUMNS * ROWS - 1]
    names = ["\n".join(textwrap.wrap(Path(name).name, _LINE_LENGTH)) for _, name, _ in shown]
    titles = ["query", *(f"{cosine:.3f}\n{name}" for name, (*_, cosine) in zip(names, shown, strict=True))]
    columns = min(6 if len(titles) <= 24 else COLUMNS, len(titles))
    grid = math.ceil(len(titles) / columns), columns
    images = [_thumbnail(image) for image in (query, *(image for image, *_ in shown))]
    framed = [True] + [False] * len(shown)
    lines = max(title.count("\n") for title in titles)
    _draw(images, titles, framed, path, "most similar images, with cosines", grid, (1.9, 1.9 + 0.16 * lines))
    return path


def _thumbnail(image: Any) -> np.ndarray | None:
    """Read an image as a small (height, width, 3) uint8; None if it cannot be read."""
    with suppress(ImageReadingError):
        picture = read_for_display(image, _THUMBNAIL)
        picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
        return np.asarray(picture)
    return None


def _draw(
    images: Sequence[Any],
    titles: Sequence[str],
    framed: Sequence[bool] | np.ndarray,
    path: Path,
    heading: str,
    grid: tuple[int, int],
    cell: tuple[float, float],
) -> None:
    """Draw images under their titles, some framed in red.

    Args:
        grid: rows and columns.
        cell: width and height of an image with its title, in inches.
    """
    require("matplotlib")
    from matplotlib.figure import Figure

    rows, columns = grid
    figure = Figure(figsize=(columns * cell[0], rows * cell[1] + 0.5))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, image, title, frame in zip(axes.flat, images, titles, framed, strict=False):
        if image is not None:
            axis.imshow(image, cmap="gray_r")
        axis.set_title(title, fontsize=9, color="firebrick" if frame else "black", pad=3, parse_math=False)
        if frame:
            axis.axis("on")
            axis.set(xticks=[], yticks=[])
            for spine in axis.spines.values():
                spine.set(edgecolor="firebrick", linewidth=2)
    figure.suptitle(heading, fontsize=11)
    with warnings.catch_warnings(), new_file(path, overwrite=True) as file:
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # drawn as a box
        figure.tight_layout(pad=0.5, rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
        figure.savefig(file, dpi=120)
