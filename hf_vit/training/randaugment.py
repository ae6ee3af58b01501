"""RandAugment (arXiv 1909.13719) as the original recipes used it: the operations and ranges of TensorFlow's TPU models.

Facts from `distort_image_with_randaugment`, google-research/big_vision, pp/autoaugment.py, which differs from PIL's
operations and from timm's in ways that are kept here: one of 16 operations per layer with equal chances and no
probability of its own; `solarize`, `posterize` and `solarize_add` with ranges of their own; a `contrast` whose grey
level is the number of pixels divided by 256; pixels moved in from outside are 128. Where PIL rounds and TensorFlow
truncates, pixels differ by one level.
"""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

MAX_LEVEL = 10
CUTOUT_PIXELS = 40
TRANSLATE_PIXELS = 100
FILL = 128

Operation = Callable[[Image.Image, float, np.random.Generator], Image.Image]


def randaugment(image: Image.Image, layers: int, magnitude: float, rng: np.random.Generator) -> Image.Image:
    """Apply `layers` operations drawn at random, each at strength `magnitude` (10 is the scale of the ranges).

    Args:
        image: mode RGB or L.
    """
    for _ in range(layers):
        operation = OPERATIONS[int(rng.integers(len(OPERATIONS)))]
        image = operation(image, magnitude / MAX_LEVEL, rng)
    return image


def autocontrast(image: Image.Image, level: float, rng) -> Image.Image:
    """Stretch each channel to 0..255."""
    return point_per_channel(image, stretch)


def stretch(channel: Image.Image) -> np.ndarray:
    values = np.asarray(channel)
    low, high = int(values.min()), int(values.max())
    levels = np.arange(256, dtype=np.float32)
    if high <= low:
        return levels
    scale = np.float32(255 / (high - low))
    return np.clip(levels * scale - low * scale, 0, 255)


def equalize(image: Image.Image, level: float, rng) -> Image.Image:
    return ImageOps.equalize(image)


def invert(image: Image.Image, level: float, rng) -> Image.Image:
    return ImageOps.invert(image)


def posterize(image: Image.Image, level: float, rng) -> Image.Image:
    """Keep the upper int(4 level) bits; a shift by all 8 is one by 7 in TensorFlow."""
    shift = min(8 - int(level * 4), 7)
    return point(image, (np.arange(256) >> max(shift, 0)) << max(shift, 0))


def solarize(image: Image.Image, level: float, rng) -> Image.Image:
    """Invert what is not below int(256 level); from level 1 on nothing is."""
    values = np.arange(256)
    return point(image, np.where(values < int(level * 256), values, 255 - values))


def solarize_add(image: Image.Image, level: float, rng) -> Image.Image:
    values = np.arange(256)
    return point(image, np.where(values < 128, np.minimum(values + int(level * 110), 255), values))


def color(image: Image.Image, level: float, rng) -> Image.Image:
    return ImageEnhance.Color(image).enhance(enhancement(level))


def brightness(image: Image.Image, level: float, rng) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(enhancement(level))


def sharpness(image: Image.Image, level: float, rng) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(enhancement(level))


def contrast(image: Image.Image, level: float, rng) -> Image.Image:
    """Blend with a grey that the original computes from the number of pixels: 196 at 224 x 224."""
    grey = min(image.width * image.height // 256, 255)
    flat = Image.new(image.mode, image.size, (grey,) * len(image.getbands()))
    return Image.blend(flat, image, enhancement(level))


def enhancement(level: float) -> float:
    return 1.8 * level + 0.1


def rotate(image: Image.Image, level: float, rng) -> Image.Image:
    """By up to 30 degrees either way, about the centre."""
    angle = math.radians(either_way(30 * level, rng))
    cos, sin = math.cos(angle), math.sin(angle)
    x, y = (image.width - 1) / 2, (image.height - 1) / 2
    return move(image, (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y))


def shear_x(image: Image.Image, level: float, rng) -> Image.Image:
    return move(image, (1, either_way(0.3 * level, rng), 0, 0, 1, 0))


def shear_y(image: Image.Image, level: float, rng) -> Image.Image:
    return move(image, (1, 0, 0, either_way(0.3 * level, rng), 1, 0))


def translate_x(image: Image.Image, level: float, rng) -> Image.Image:
    return move(image, (1, 0, either_way(TRANSLATE_PIXELS * level, rng), 0, 1, 0))


def translate_y(image: Image.Image, level: float, rng) -> Image.Image:
    return move(image, (1, 0, 0, 0, 1, either_way(TRANSLATE_PIXELS * level, rng)))


def cutout(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    """Cover a square of up to 80 pixels, centred anywhere in the image."""
    pad = int(level * CUTOUT_PIXELS)
    x, y = int(rng.integers(image.width)), int(rng.integers(image.height))
    if not pad:
        return image
    image = image.copy()
    box = (max(x - pad, 0), max(y - pad, 0), x + pad - 1, y + pad - 1)
    ImageDraw.Draw(image).rectangle(box, fill=(FILL,) * len(image.getbands()))
    return image


OPERATIONS: tuple[Operation, ...] = (
    autocontrast,
    equalize,
    invert,
    rotate,
    posterize,
    solarize,
    color,
    contrast,
    brightness,
    sharpness,
    shear_x,
    shear_y,
    translate_x,
    translate_y,
    cutout,
    solarize_add,
)


def either_way(amount: float, rng: np.random.Generator) -> float:
    return amount if rng.random() < 0.5 else -amount


def move(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    """Nearest-neighbour affine map, grey outside. `matrix` takes an output pixel (x, y) to its input pixel.

    PIL counts from the corners of pixels, the matrix from their centres.
    """
    a, b, c, d, e, f = matrix
    corners = (a, b, c + 0.5 - 0.5 * (a + b), d, e, f + 0.5 - 0.5 * (d + e))
    fill = (FILL,) * len(image.getbands())
    return image.transform(image.size, Image.Transform.AFFINE, corners, Image.Resampling.NEAREST, fillcolor=fill)


def point(image: Image.Image, table: np.ndarray) -> Image.Image:
    """Map each of the 256 levels, the same way in every channel."""
    return image.point(table.astype(np.uint8).tolist() * len(image.getbands()))


def point_per_channel(image: Image.Image, table_of: Callable[[Image.Image], np.ndarray]) -> Image.Image:
    tables = [table_of(channel).astype(np.uint8).tolist() for channel in image.split()]
    return image.point([value for table in tables for value in table])
