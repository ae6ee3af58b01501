"""Sizes and weights of TensorFlow's and Pillow's resize methods, in NumPy.

`image_resizing` applies them with torch, and `runtimes.runner` without it. In the following, an axis (the height or the
width) of `old` pixels is resized to `new` pixels, of which a crop keeps those in `part`.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

AREA = "area"  # TensorFlow's area resize, which differs from Pillow's box filter
BILINEAR, BICUBIC = Image.Resampling.BILINEAR.value, Image.Resampling.BICUBIC.value


def shortest_edge_size(height: int, width: int, side: int, truncate: bool) -> tuple[int, int]:
    """Return (height, width) of an image after a resize of its shorter side to `side`.

    With `truncate`, the longer side is rounded down, as in torchvision's `Resize`. Otherwise, it is computed from a
    float32 ratio and rounded half to even, as in big_vision's `resize_small`.
    """
    short = min(height, width)
    if truncate:
        return side * height // short, side * width // short
    ratio = np.float32(side) / np.float32(short)
    return int(np.rint(np.float32(height) * ratio)), int(np.rint(np.float32(width) * ratio))


def crop_rounding(preset: str, resize_output: str) -> str:
    """Return how a center crop with these settings of an image processor rounds, see `center_window`."""
    if preset == "transformers":
        return "down"
    return "half_even" if resize_output == "rounded" else "toward_zero"


def center_window(size: tuple[int, int], crop_size: dict[str, int], rounding: str) -> tuple[range, range]:
    """Return the rows and columns of a center crop; negative ones are in the black border of a small image.

    Args:
        size: (height, width) of the image.
        crop_size: "height" and "width" of the crop.
        rounding: of half the difference. "toward_zero": big_vision's `central_crop`; "down": `center_crop` of
            transformers' image_transforms.py; "half_even": torchvision's `CenterCrop`, which rounds a border toward
            zero.
    """
    window = []
    for old, new in zip(size, (crop_size["height"], crop_size["width"]), strict=True):
        half = (old - new) / 2
        start = math.trunc(half)
        if rounding == "down":
            start = math.floor(half)
        elif rounding == "half_even" and half > 0:
            start = round(half)
        window.append(range(start, start + new))
    return window[0], window[1]


def bilinear_weights(old: int, new: int, part: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the indices of the two neighbors of each pixel, and the float32 weight of the second.

    Source: `tf.image.resize(method="bilinear")`, with half-pixel centers and without antialiasing.
    """
    scale = np.float32(old) / np.float32(new)
    position = (np.arange(part.start, part.stop, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    below = np.floor(position)
    first = np.maximum(below, 0).astype(np.int64)
    second = np.minimum(np.ceil(position), old - 1).astype(np.int64)
    return first, second, position - below


def area_weights(old: int, new: int, part: range) -> tuple[np.ndarray, np.ndarray]:
    """Return pixel indices and the covered part of each pixel in float32, both (pixels of `part`, taps).

    Source: `tf.image.resize(method="area")`. Sums are to be divided by `old / new`.
    """
    scale = np.float32(old) / np.float32(new)
    edges = np.arange(part.start, part.stop + 1, dtype=np.float32)[:, None] * scale
    start = edges[:-1]
    end = edges[1:]
    first = np.floor(start)
    last = np.ceil(end)
    left = first + np.arange((last - first).max(), dtype=np.float32)
    covered = np.minimum(left + 1, end) - np.maximum(left, start)
    covered = np.where((left < start) & (left + 1 > end), scale, covered)
    weights = np.where(left < last, covered, np.float32(0))
    return np.minimum(left, old - 1).astype(np.int64), weights


def filter_weights(old: int, new: int, part: range, resample: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pixel indices and float64 weights of an antialiasing filter, both (pixels of `part`, taps).

    Source: `precompute_coeffs` in Pillow's Resample.c.

    Args:
        resample: a key of `KERNELS`.
    """
    if resample not in KERNELS:
        raise ValueError(f'cannot resize with resample={resample} in backend="torch" (expected {sorted(KERNELS)})')
    kernel, radius = KERNELS[resample]
    scale = old / new
    widening = max(scale, 1.0)
    center = (np.arange(part.start, part.stop) + 0.5)[:, None] * scale
    first = np.maximum(np.trunc(center - radius * widening + 0.5), 0)
    last = np.minimum(np.trunc(center + radius * widening + 0.5), old)
    pixels = first + np.arange((last - first).max())
    distances = np.abs(pixels - center + 0.5) * (1 / widening)
    weights = np.where(pixels < last, kernel(distances), 0)
    weights *= 1 / weights.sum(1, keepdims=True)
    return np.minimum(pixels, old - 1).astype(np.int64), weights


def triangle(distance: Any) -> Any:
    """Kernel of linear interpolation, for distances of at least 0, as an array or a tensor."""
    return (1 - distance).clip(0)


def cubic(distance: Any) -> Any:
    """Kernel of cubic convolution (Keys 1981) with a = -1/2, for distances of at least 0, as an array or a tensor."""
    inner = (1.5 * distance - 2.5) * distance * distance + 1
    outer = (((distance - 5) * distance + 8) * distance - 4) * -0.5
    return inner * (distance < 1) + outer * ((distance >= 1) & (distance < 2))


# Filter -> (kernel, radius in pixels)
KERNELS: dict[int, tuple[Callable[[Any], Any], int]] = {
    BILINEAR: (triangle, 1),
    BICUBIC: (cubic, 2),
}
