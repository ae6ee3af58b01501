"""Contact sheets: pages of images with captions."""

import math
import textwrap
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..files.download import fetch_image
from ..files.output import new_file
from ..files.pictures import read_for_display
from ..files.versions import require
from ..models.image_reading import ImageReadingError

_COLUMNS, _MAX_IMAGES = 12, 96
_LINE_LENGTH = 17  # characters of a name that fit above its image, even if all are wide
_THUMBNAIL = 320  # largest number of pixels of the longer side, approximately


def draw_contact_sheet(images: list, labels: np.ndarray, predictions: np.ndarray, path: Path) -> Path:
    """Draw the wrong images, framed in red with the right label, then right ones, up to a full page.

    Args:
        images: PIL images or arrays, (number,).
        labels, predictions: class indices, (number,).
    """
    order = np.argsort(labels == predictions, kind="stable")[:_MAX_IMAGES]
    wrong = (labels[order] != predictions[order]).tolist()
    titles = [f"{predictions[index]}, is {labels[index]}" if bad else str(predictions[index])
              for index, bad in zip(order, wrong, strict=True)]  # fmt: skip
    heading = (
        f"{len(labels)} held-out digits, accuracy {(labels == predictions).mean():.2%}; misclassified first, in red"
    )
    _draw([images[index] for index in order], titles, wrong, path, heading, 1.0)
    return path


def draw_neighbors(query: Any, found: Sequence[tuple[Any, str, float]], path: Path) -> Path:
    """Draw a query image, framed, and the similar images with their cosines.

    Args:
        query: an input of `read_image`, or an address.
        found: (image, name, cosine), most similar first; an unreadable image leaves an empty tile.
        path: file to write.
    """
    shown = found[: _MAX_IMAGES - 1]
    names = ["\n".join(textwrap.wrap(Path(name).name, _LINE_LENGTH)) for _, name, _ in shown]
    titles = ["query", *(f"{cosine:.3f}\n{name}" for name, (*_, cosine) in zip(names, shown, strict=True))]
    images = [_thumbnail(image) for image in (query, *(image for image, *_ in shown))]
    _draw(images, titles, [True] + [False] * len(shown), path, "most similar images, with cosines", 1.9)
    return path


def _thumbnail(image: Any) -> np.ndarray | None:
    """Read an image as a small (height, width, 3) uint8; None if it cannot be read."""
    with suppress(ImageReadingError):
        picture = read_for_display(fetch_image(image), _THUMBNAIL)
        picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
        return np.asarray(picture)
    return None


def _draw(
    images: Sequence[Any], titles: Sequence[str], framed: Sequence[bool], path: Path, heading: str, size: float
) -> None:
    """Draw images under their titles, some framed in red; `size` is that of an image in inches."""
    require("matplotlib")
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(images))
    rows = math.ceil(len(images) / columns)
    lines = max(title.count("\n") for title in titles)
    figure = Figure(figsize=(columns * size, rows * (size + 0.16 * lines) + 0.5), layout="tight")
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
            axis.spines[:].set(edgecolor="firebrick", linewidth=2)
    figure.suptitle(heading, fontsize=11)
    with warnings.catch_warnings(), new_file(path, overwrite=True) as file:
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)  # drawn as a box
        figure.savefig(file, dpi=120)
