"""RandAugment (arXiv 1909.13719) of the original recipes, with the operations and ranges of TensorFlow's TPU models.

It follows `distort_image_with_randaugment` of google-research/big_vision, pp/archive/autoaugment.py, where that differs
from PIL and timm:

* Each layer applies one of 16 operations, with equal probability; it is never skipped.
* `Solarize`, `Posterize` and `SolarizeAdd` have their own ranges.
* The gray of `Contrast` is the number of pixels divided by 256.
* Results are truncated where PIL rounds.
* Pixels moved in from outside are 128.

Tested against outputs of that code in TensorFlow (tests/goldens/training/randaugment.npz). They are equal except in
`Sharpness`, whose 3 x 3 mean in TensorFlow is rounded below an integer in 1 % of the places.
"""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageOps

_Operation = Callable[[Image.Image, float, np.random.Generator], Image.Image]

_MAX_LEVEL = 10
_CUTOUT_PIXELS = 40
_TRANSLATE_PIXELS = 100
_FILL = 128
# `tf.image.rgb_to_grayscale`: these weights of levels in [0, 1], then times 255.5 and truncated
_GRAY_WEIGHTS = tuple(weight * 255.5 / 255 for weight in (0.2989, 0.5870, 0.1140))


def randaugment(image: Image.Image, layers: int, magnitude: float, rng: np.random.Generator) -> Image.Image:
    """Apply `layers` random operations, each at strength `magnitude` (10 is the full range).

    Args:
        image: mode RGB or L.
    """
    for _ in range(layers):
        operation = _DRAWN[int(rng.integers(len(_DRAWN)))]
        image = operation(image, magnitude / _MAX_LEVEL, rng)
    return image


def _autocontrast(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    """Stretch each channel to 0..255."""
    return image.point([value for channel in image.split() for value in _stretch(np.asarray(channel))])


def _stretch(levels: np.ndarray) -> list[int]:
    """Table that maps the lowest level to 0 and the highest to 255."""
    low, high = int(levels.min()), int(levels.max())
    if high <= low:
        return list(range(256))
    scale = np.float32(255 / (high - low))
    table = np.arange(256, dtype=np.float32) * scale - low * scale
    return np.clip(table, 0, 255).astype(np.uint8).tolist()


def _posterize(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    """Keep the upper int(4 * level) bits, at most 8; for 0 bits, TensorFlow shifts by 7 instead of 8."""
    shift = min(max(8 - int(level * 4), 0), 7)
    return _point(image, np.arange(256) >> shift << shift)


def _solarize(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    """Invert values of int(256 * level) and more; as a uint8, a threshold of 256 or 512 wraps to 0."""
    threshold, values = int(level * 256) % 256, np.arange(256)
    return _point(image, np.where(values < threshold, values, 255 - values))


def _solarize_add(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    values = np.arange(256)
    return _point(image, np.where(values < 128, np.minimum(values + int(level * 110), 255), values))


def _enhance(plain: Image.Image, image: Image.Image, level: float) -> Image.Image:
    return Image.blend(plain, image, level * 1.8 + 0.1)


def _color(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    """Blend with the image in gray."""
    if image.mode == "L":
        return image
    gray = image.convert("L", (*_GRAY_WEIGHTS, -0.5))  # PIL adds 0.5 before it truncates
    return _enhance(gray.convert(image.mode), image, level)


def _contrast(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    """Blend with a gray that depends on the number of pixels, as in the original: 196 at 224 x 224."""
    gray = min(image.width * image.height // 256, 255)
    return _enhance(_plain(image, gray), image, level)


def _smooth(image: Image.Image) -> Image.Image:
    """Mean of 3 x 3 pixels, truncated; the middle one has weight 5, and border pixels are unchanged."""
    bands = len(image.getbands())
    smooth = np.array(image).reshape(image.height, -1)  # (height, width * bands)
    levels = smooth.astype(np.uint16)
    rows = levels[:-2] + levels[1:-1]
    rows += levels[2:]
    sums = rows[:, : -2 * bands] + rows[:, bands:-bands]
    sums += rows[:, 2 * bands :]
    sums += levels[1:-1, bands:-bands] << 2
    sums //= 13
    smooth[1:-1, bands:-bands] = sums
    return Image.frombytes(image.mode, image.size, smooth.data)


def _rotate(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    """Rotate by 30 degrees times `level` in either direction, about the center."""
    angle = np.float32(math.radians(_either_way(30 * level, rng)))
    cos, sin = np.cos(angle), np.sin(angle)
    right, bottom = np.float32(image.width - 1), np.float32(image.height - 1)
    x, y = _pixel_centers(image)
    from_x = cos * x - sin * y  # (height, width)
    from_x += (right - (cos * right - sin * bottom)) / 2
    from_y = sin * x + cos * y
    from_y += (bottom - (sin * right + cos * bottom)) / 2
    return _take_nearest(image, from_x, from_y)


def _shear(image: Image.Image, amount: float, is_across: bool) -> Image.Image:
    x, y = _pixel_centers(image)
    factor = np.float32(amount)
    return _take_nearest(image, x + factor * y, y) if is_across else _take_nearest(image, x, factor * x + y)


def _pixel_centers(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Horizontal (1, width) and vertical (height, 1) coordinates."""
    return np.arange(image.width, dtype=np.float32)[None], np.arange(image.height, dtype=np.float32)[:, None]


def _take_nearest(image: Image.Image, from_x: np.ndarray, from_y: np.ndarray) -> Image.Image:
    """Take the pixels nearest to float32 coordinates, gray outside the image.

    The arithmetic is that of TensorFlow Addons' `transform`, because shears have whole rows halfway between two pixels.
    PIL's fixed-point coordinates are off by up to 0.003 pixels.

    Args:
        from_x, from_y: coordinates that broadcast to (height, width); changed in place.
    """
    from_x += np.float32(0.5)
    from_y += np.float32(0.5)
    outside = (from_x <= 0) | (from_x >= image.width) | ((from_y <= 0) | (from_y >= image.height))
    numbers = from_y.astype(np.int32) * image.width + from_x.astype(np.int32)
    layout, pixel, gray = ("L", np.uint8, _FILL) if image.mode == "L" else ("RGBX", np.uint32, _FILL * 0x01010101)
    taken = np.frombuffer(image.tobytes("raw", layout), pixel).take(numbers, mode="clip")
    taken[outside] = gray
    return Image.frombytes(image.mode, image.size, taken.data, "raw", layout)


def _pixels(level: float, rng: np.random.Generator) -> int:
    """Draw by how many pixels an image is translated."""
    return math.floor(_either_way(_TRANSLATE_PIXELS * level, rng) + 0.5)


def _shift(image: Image.Image, left: int, up: int) -> Image.Image:
    """Shift by whole pixels, with gray at the free border."""
    shifted = _plain(image, _FILL)
    shifted.paste(image, (-left, -up))
    return shifted


def _cutout(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    """Cover a square of 80 pixels times `level`, centered anywhere in the image."""
    pad = int(level * _CUTOUT_PIXELS)
    x, y = int(rng.integers(image.width)), int(rng.integers(image.height))
    if not pad:
        return image
    image = image.copy()
    box = (max(x - pad, 0), max(y - pad, 0), x + pad - 1, y + pad - 1)
    ImageDraw.Draw(image).rectangle(box, fill=(_FILL,) * len(image.getbands()))
    return image


# The original's names, in the order of its random numbers
OPERATIONS: dict[str, _Operation] = {
    "AutoContrast": _autocontrast,
    "Equalize": lambda image, level, rng: ImageOps.equalize(image),
    "Invert": lambda image, level, rng: ImageChops.invert(image),
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "Color": _color,
    "Contrast": _contrast,
    "Brightness": lambda image, level, rng: _enhance(_plain(image, 0), image, level),
    "Sharpness": lambda image, level, rng: _enhance(_smooth(image), image, level),
    "ShearX": lambda image, level, rng: _shear(image, _either_way(0.3 * level, rng), True),
    "ShearY": lambda image, level, rng: _shear(image, _either_way(0.3 * level, rng), False),
    "TranslateX": lambda image, level, rng: _shift(image, _pixels(level, rng), 0),
    "TranslateY": lambda image, level, rng: _shift(image, 0, _pixels(level, rng)),
    "Cutout": _cutout,
    "SolarizeAdd": _solarize_add,
}
_DRAWN = tuple(OPERATIONS.values())


def _either_way(amount: float, rng: np.random.Generator) -> float:
    return amount if rng.random() < 0.5 else -amount


def _plain(image: Image.Image, level: int) -> Image.Image:
    """Image of the same size and mode with one level everywhere."""
    return Image.new(image.mode, image.size, (level,) * len(image.getbands()))


def _point(image: Image.Image, table: np.ndarray) -> Image.Image:
    """Map each of the 256 levels by a table, in every channel."""
    return image.point(table.astype(np.uint8).tolist() * len(image.getbands()))
