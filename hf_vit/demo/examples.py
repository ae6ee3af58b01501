"""Example pictures of the page: built-in drawings, or those of a folder."""

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter, ImageFont

from ..files.image_files import images_below
from ..models.image_reading import ImageReadingError, read_image

MOST_EXAMPLES = 12
_SHOWN = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".avif")  # what browsers show
_SIZE = 448  # pixels
_CENTRE = _SIZE / 2


def copy_examples(source: Path, folder: Path) -> list[Path]:
    """Copy the first readable images of a folder, at most `MOST_EXAMPLES`; return their files.

    Formats that browsers do not show, such as TIFF, are left out.

    Raises:
        ValueError: no image can be read and shown.
    """
    found: list[Path] = []
    for file in images_below(source):
        if file.suffix.lower() not in _SHOWN:
            continue
        try:
            read_image(file)
        except ImageReadingError:
            continue
        found.append(folder / f"{len(found) + 1:02d}-{file.name}")
        shutil.copyfile(file, found[-1])
        if len(found) == MOST_EXAMPLES:
            break
    if not found:
        raise ValueError(f"none of the images in {source} can be read and shown (expected {', '.join(_SHOWN)})")
    return found


def draw_examples(folder: Path, labels: list[str]) -> list[Path]:
    """Draw objects of ImageNet classes; for a classifier of digits, write held-out digits of scikit-learn.

    Args:
        folder: folder to write to.
        labels: class names of the classifier.

    Returns:
        The files of the pictures.
    """
    if labels and set(labels) <= set("0123456789"):
        from ..data.sources import load_digits

        digits = load_digits()["test"][: len(_THINGS)]["image"]
        pictures = {f"digit_{number}": digit.resize((320, 320)) for number, digit in enumerate(digits, start=1)}
    else:
        pictures = {name: draw().filter(ImageFilter.GaussianBlur(0.8)) for name, draw in _THINGS.items()}
    for name, picture in pictures.items():
        picture.save(folder / f"{name}.png")
    return [folder / f"{name}.png" for name in pictures]


def _ground(top: str, bottom: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Picture with a colour gradient from `top` to `bottom`, and its drawing object."""
    first, second = (Image.new("RGB", (_SIZE, _SIZE), color) for color in (top, bottom))
    picture = Image.composite(second, first, Image.linear_gradient("L").resize((_SIZE, _SIZE)))
    return picture, ImageDraw.Draw(picture)


def _around(radius: float, degrees: float) -> tuple[float, float]:
    """Point at a distance from the centre and an angle clockwise from the top."""
    angle = math.radians(degrees)
    return _CENTRE + radius * math.sin(angle), _CENTRE - radius * math.cos(angle)


def _clock() -> Image.Image:
    picture, draw = _ground("#d8d2c4", "#a89f8c")
    draw.circle((_CENTRE, _CENTRE), 184, fill="#3a2f28")
    draw.circle((_CENTRE, _CENTRE), 166, fill="#fbfaf5")
    for minute in range(60):
        start, width = (150, 2) if minute % 5 else (138, 6)
        draw.line([_around(start, 6 * minute), _around(157, 6 * minute)], fill="#222222", width=width)
    font = ImageFont.load_default(34)
    for hour in range(1, 13):
        draw.text(_around(115, 30 * hour), str(hour), fill="#222222", font=font, anchor="mm")
    for degrees, length, width in ((305, 75, 11), (60, 115, 7)):
        draw.line([(_CENTRE, _CENTRE), _around(length, degrees)], fill="#111111", width=width)
    draw.circle((_CENTRE, _CENTRE), 9, fill="#111111")
    return picture


def _traffic_light() -> Image.Image:
    picture, draw = _ground("#7fa8d6", "#dfe9f2")
    draw.rectangle((_CENTRE - 9, 330, _CENTRE + 9, _SIZE), fill="#444444")
    draw.rounded_rectangle((_CENTRE - 62, 40, _CENTRE + 62, 350), 24, fill="#1d1f1e")
    for height, color in ((95, "#ff3b30"), (195, "#4a3d10"), (295, "#103a1c")):
        draw.circle((_CENTRE, height), 40, fill=color)
    return picture


def _balloon() -> Image.Image:
    picture, draw = _ground("#3f86d0", "#cfe5f7")
    for half, color in ((130, "#d7263d"), (100, "#f4b942"), (55, "#d7263d"), (20, "#f4b942")):
        draw.ellipse((_CENTRE - half, 30, _CENTRE + half, 290), fill=color)
        top, bottom = 0.9 * half, 0.22 * half
        corners = [(_CENTRE - top, 215), (_CENTRE + top, 215), (_CENTRE + bottom, 340), (_CENTRE - bottom, 340)]
        draw.polygon(corners, fill=color)
    for side in (-1, 1):
        draw.line([(_CENTRE + side * 24, 340), (_CENTRE + side * 18, 375)], fill="#333333", width=3)
    draw.rounded_rectangle((_CENTRE - 24, 372, _CENTRE + 24, 408), 6, fill="#7a4b22")
    return picture


def _candle() -> Image.Image:
    picture, draw = _ground("#1b120c", "#3a2413")
    glow = Image.new("L", picture.size)
    ImageDraw.Draw(glow).ellipse((_CENTRE - 110, 20, _CENTRE + 110, 240), fill=150)
    picture.paste("#e88a1a", mask=glow.filter(ImageFilter.GaussianBlur(45)))
    draw.rectangle((_CENTRE - 48, 190, _CENTRE + 48, _SIZE), fill="#efe3c8")
    draw.ellipse((_CENTRE - 48, 178, _CENTRE + 48, 204), fill="#fff3d6")
    draw.line([(_CENTRE, 190), (_CENTRE, 160)], fill="#222222", width=5)
    draw.ellipse((_CENTRE - 20, 85, _CENTRE + 20, 172), fill="#ffb52e")
    draw.polygon([(_CENTRE - 18, 115), (_CENTRE + 18, 115), (_CENTRE, 50)], fill="#ffb52e")
    draw.ellipse((_CENTRE - 9, 120, _CENTRE + 9, 165), fill="#fff6d0")
    return picture


def _honeycomb() -> Image.Image:
    picture, draw = _ground("#8a4b08", "#8a4b08")
    radius = 30
    for row in range(-1, 12):
        for column in range(-1, 10):
            x, y = radius * (1.82 * column + 0.91 * (row % 2)), 1.58 * radius * row
            draw.regular_polygon(
                (x, y, 0.92 * radius), 6, rotation=30, fill="#e9a11b" if (7 * column + 3 * row) % 5 else "#c97a10"
            )
    return picture


def _crossword() -> Image.Image:
    picture, draw = _ground("white", "white")
    cells, chance = 13, random.Random(5)
    side = _SIZE / cells
    for row in range(cells):
        for column in range(cells):
            fill = "#111111" if chance.random() < 0.22 else "white"
            place = (row * side, column * side, (row + 1) * side, (column + 1) * side)
            draw.rectangle(place, fill=fill, outline="#111111", width=2)
    return picture


_THINGS: dict[str, Callable[[], Image.Image]] = {
    "clock": _clock,
    "traffic_light": _traffic_light,
    "balloon": _balloon,
    "candle": _candle,
    "honeycomb": _honeycomb,
    "crossword": _crossword,
}
