"""RandAugment (arXiv 1909.13719) of the original recipes, with the operations and ranges of TensorFlow's TPU models.

It follows `distort_image_with_randaugment` of google-research/big_vision, pp/archive/autoaugment.py, where that differs
from PIL and timm:

* Each layer applies one of 16 operations, with equal probability; it is never skipped.
* `Solarize`, `Posterize` and `SolarizeAdd` have their own ranges.
* The gray of `Contrast` is the number of pixels divided by 256.
* Results are truncated where PIL rounds.
* Pixels moved in from outside are 128.

Tested against outputs of that code in TensorFlow (tests/goldens/training/randaugment.npz). They are equal except in
`Sharpness`, whose 3 x 3 mean in TensorFlow is rounded below an integer in 1% of the pixels.

Random numbers are drawn first (`draw_operations`), so that the pixels can be computed elsewhere: here on one PIL image,
in `device_augmentation` on a batch. Both use the tables and coefficients of this file.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps

_MAX_LEVEL = 10
_CUTOUT_PIXELS = 40
_TRANSLATE_PIXELS = 100
FILL = 128  # gray of pixels from outside of the image
# `tf.image.rgb_to_grayscale`: these weights of levels in [0, 1], then times 255.5 and truncated
GRAY_WEIGHTS = tuple(weight * 255.5 / 255 for weight in (0.2989, 0.5870, 0.1140))

# The original's names, in the order of its random numbers
NAMES = (
    "AutoContrast Equalize Invert Rotate Posterize Solarize Color Contrast Brightness Sharpness ShearX ShearY "
    "TranslateX TranslateY Cutout SolarizeAdd"
).split()
MOVES = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")


class Operation(NamedTuple):
    """A random operation."""

    number: int  # in NAMES
    is_negative: bool = False  # of MOVES: the direction
    x: int = 0  # of Cutout: the center
    y: int = 0


def randaugment(image: Image.Image, layers: int, magnitude: float, rng: np.random.Generator) -> Image.Image:
    """Apply `layers` random operations, each at strength `magnitude` (10 is the full range).

    Args:
        image: mode RGB or L.
    """
    for operation in draw_operations(layers, (image.height, image.width), rng):
        image = apply(image, operation, level_of(magnitude))
    return image


def level_of(magnitude: float) -> float:
    """Return the strength as a share of the full range."""
    return magnitude / _MAX_LEVEL


def draw_operations(layers: int, size: tuple[int, int], rng: np.random.Generator) -> list[Operation]:
    """Draw the operations of an image of this (height, width)."""
    return [draw(int(rng.integers(len(NAMES))), size, rng) for _ in range(layers)]


def draw(number: int, size: tuple[int, int], rng: np.random.Generator) -> Operation:
    if NAMES[number] in MOVES:
        return Operation(number, is_negative=rng.random() >= 0.5)
    if NAMES[number] == "Cutout":
        return Operation(number, x=int(rng.integers(size[1])), y=int(rng.integers(size[0])))
    return Operation(number)


def apply(image: Image.Image, operation: Operation, level: float) -> Image.Image:
    """Apply an operation to an image of mode RGB or L."""
    name = NAMES[operation.number]
    if name in TABLES:
        table = TABLES[name](level, image.width * image.height)
        return image.point(table.tolist() * len(image.getbands()))
    match name:
        case "AutoContrast":
            return image.point([value for channel in image.split() for value in _stretch(np.asarray(channel))])
        case "Equalize":
            return ImageOps.equalize(image)
        case "Color":
            if image.mode == "L":
                return image
            gray = image.convert("L", (*GRAY_WEIGHTS, -0.5))  # PIL adds 0.5 before it truncates
            return Image.blend(gray.convert(image.mode), image, enhancement(level))
        case "Sharpness":
            return Image.blend(_smooth(image), image, enhancement(level))
        case "Cutout":
            return _cutout(image, cutout_padding(level), operation.x, operation.y)
    return _move(image, operation, level)


def _move(image: Image.Image, operation: Operation, level: float) -> Image.Image:
    """Shear, rotate or shift an image."""
    (a, b, c), (d, e, f) = move(operation, level, (image.height, image.width))
    x = np.arange(image.width, dtype=np.float32)[None]
    y = np.arange(image.height, dtype=np.float32)[:, None]
    match NAMES[operation.number]:
        case "ShearX":
            return _take_nearest(image, x + b * y, y)
        case "ShearY":
            return _take_nearest(image, x, d * x + y)
        case "Rotate":
            from_x = a * x + b * y  # (height, width)
            from_y = d * x + e * y
            from_x += c
            from_y += f
            return _take_nearest(image, from_x, from_y)
    return _shift(image, int(c), int(f))


def _stretch(levels: np.ndarray) -> list[int]:
    """Table that maps the lowest level to 0 and the highest to 255."""
    low, high = int(levels.min()), int(levels.max())
    if high <= low:
        return list(range(256))
    scale = np.float32(255 / (high - low))
    return _as_levels(np.arange(256, dtype=np.float32) * scale - low * scale).tolist()


def _posterize(level: float, pixels: int) -> np.ndarray:
    """Keep the upper int(4 * level) bits, at most 8; for 0 bits, TensorFlow shifts by 7 instead of 8."""
    shift = min(max(8 - int(level * 4), 0), 7)
    return np.arange(256) >> shift << shift


def _solarize(level: float, pixels: int) -> np.ndarray:
    """Invert values of int(256 * level) and more; as a uint8, a threshold of 256 or 512 wraps to 0."""
    threshold, values = int(level * 256) % 256, np.arange(256)
    return np.where(values < threshold, values, 255 - values)


def _solarize_add(level: float, pixels: int) -> np.ndarray:
    values = np.arange(256)
    return np.where(values < 128, np.minimum(values + int(level * 110), 255), values)


def _blend(gray: int, level: float) -> np.ndarray:
    """Blend each level with a gray, in the arithmetic of `Image.blend`."""
    return _as_levels(gray + np.float32(enhancement(level)) * (np.arange(256, dtype=np.float32) - gray))


def _as_levels(values: np.ndarray) -> np.ndarray:
    return np.clip(values, 0, 255).astype(np.uint8)


# Operations that map each level by a table of 256, whatever the image: (level, number of pixels) -> table
TABLES: dict[str, Callable[[float, int], np.ndarray]] = {
    "Invert": lambda level, pixels: np.arange(256)[::-1],
    "Posterize": _posterize,
    "Solarize": _solarize,
    # The gray depends on the number of pixels, as in the original: 196 at 224 x 224
    "Contrast": lambda level, pixels: _blend(min(pixels // 256, 255), level),
    "Brightness": lambda level, pixels: _blend(0, level),
    "SolarizeAdd": _solarize_add,
}


def enhancement(level: float) -> float:
    """Weight of the image in Color, Contrast, Brightness and Sharpness; above 1 it is exaggerated."""
    return level * 1.8 + 0.1


def cutout_padding(level: float) -> int:
    """Half the side of the square that Cutout covers."""
    return int(level * _CUTOUT_PIXELS)


def move(operation: Operation, level: float, size: tuple[int, int]) -> np.ndarray:
    """Return coefficients (2, 3), float32: a pixel at x, y comes from a x + b y + c, d x + e y + f.

    Operations other than MOVES have the identity.

    Args:
        size: (height, width) of the image.
    """
    name = NAMES[operation.number]
    amount = -level if operation.is_negative else level
    coefficients = np.eye(2, 3, dtype=np.float32)
    if name == "Rotate":  # by up to 30 degrees, about the center
        angle = np.float32(math.radians(30 * amount))
        cos, sin = np.cos(angle), np.sin(angle)
        bottom, right = (np.float32(side - 1) for side in size)
        coefficients[0] = cos, -sin, (right - (cos * right - sin * bottom)) / 2
        coefficients[1] = sin, cos, (bottom - (sin * right + cos * bottom)) / 2
    elif name == "ShearX":
        coefficients[0, 1] = 0.3 * amount
    elif name == "ShearY":
        coefficients[1, 0] = 0.3 * amount
    elif name in MOVES:
        coefficients[int(name == "TranslateY"), 2] = math.floor(_TRANSLATE_PIXELS * amount + 0.5)
    return coefficients


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
    layout, pixel, gray = ("L", np.uint8, FILL) if image.mode == "L" else ("RGBX", np.uint32, FILL * 0x01010101)
    taken = np.frombuffer(image.tobytes("raw", layout), pixel).take(numbers, mode="clip")
    taken[outside] = gray
    return Image.frombytes(image.mode, image.size, taken.data, "raw", layout)


def _shift(image: Image.Image, left: int, up: int) -> Image.Image:
    """Shift by whole pixels, with gray at the free border."""
    shifted = Image.new(image.mode, image.size, (FILL,) * len(image.getbands()))
    shifted.paste(image, (-left, -up))
    return shifted


def _cutout(image: Image.Image, padding: int, x: int, y: int) -> Image.Image:
    """Cover a square about a pixel, which may cross the border."""
    if not padding:
        return image
    image = image.copy()
    box = (max(x - padding, 0), max(y - padding, 0), x + padding - 1, y + padding - 1)
    ImageDraw.Draw(image).rectangle(box, fill=(FILL,) * len(image.getbands()))
    return image
