"""Quality measures of images, from one reading of each file, and the images with poor values."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from ..data.splits import Split
from ..models.image_reading import ImageReadingError, is_npy, read_image, read_size
from .duplicates import SIDE

_LONGER_SIDE = 256  # pixels of the longer side at which sharpness is measured
_DARK = 0.32  # brightness of the lightest hundredth of a dark image, as in cleanvision
_BLURRED = 0.25  # sharpness of a blurred image, as a share of the median
_TINY = 0.25  # shorter side of a tiny image, as a share of the median
_ODD, _ODDER = 3.0, 2.0  # longer side by shorter side of an odd shape, itself and by the median
_NEIGHBORS = 10
_FAR = 3.0  # interquartile ranges above the third quartile


class Measures(NamedTuple):
    """Measures of a readable image.

    Args:
        digest: SHA-256 of the file.
        width, height: in pixels.
        brightness: of the lightest hundredth of the pixels, from 0 to 1.
        sharpness: deviation of the Laplacian by the deviation of the gray levels.
        picture: (SIDE, SIDE) gray levels of the whole image.
    """

    digest: str
    width: int
    height: int
    brightness: float
    sharpness: float
    picture: np.ndarray


def measure_split(split: Split, num_channels: int, num_threads: int) -> Iterator[Measures | None]:
    """Yield the measures of each image of a split, in order; None for an unreadable one."""

    def measure_row(row: int) -> Measures | None:
        file = split.image(split.samples[row], row)
        try:
            content = file["bytes"] if file["bytes"] is not None else Path(file["path"]).read_bytes()
            return measure(content, num_channels)
        except (ImageReadingError, OSError):
            return None

    with ThreadPoolExecutor(max(num_threads, 1)) as pool:
        yield from pool.map(measure_row, range(len(split)))


def measure(content: bytes, num_channels: int = 3) -> Measures:
    """Measure the image of a file's content; with other channels than color, their mean is the gray level."""
    gray_from = 1 if num_channels == 3 else num_channels
    levels = (
        read_image(content, gray_from, reduce_to=lambda height, width: (_LONGER_SIDE, _LONGER_SIDE)).float().mean(dim=0)
    )
    height, width = levels.shape if is_npy(content) else read_size(content)
    image = Image.fromarray(levels.byte().numpy())
    picture = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    image.thumbnail((_LONGER_SIDE, _LONGER_SIDE), Image.Resampling.BOX)
    gray = np.asarray(image, np.float32)
    padded = np.pad(gray, 1, "edge")
    laplacian = 4 * gray - padded[:-2, 1:-1] - padded[2:, 1:-1] - padded[1:-1, :-2] - padded[1:-1, 2:]
    sharpness = laplacian.std() / max(gray.std(), 1)
    brightness = np.percentile(gray, 99) / 255
    return Measures(hashlib.sha256(content).hexdigest(), width, height, float(brightness), float(sharpness), picture)


def find_poor_images(measures: list[Measures]) -> dict[str, dict[int, float]]:
    """Return for each kind of issue the rows of the images that have it, with their scores from 0 to 1."""
    brightness, sharpness = np.array([[one.brightness, one.sharpness] for one in measures]).T
    sides = np.array([[one.width, one.height] for one in measures], np.float64)
    shorter, shape = sides.min(axis=1), sides.max(axis=1) / sides.min(axis=1)
    sizes = shorter / np.median(shorter)
    relative = sharpness / max(float(np.median(sharpness)), 1e-6)
    is_odd = (shape > _ODD) & (shape > _ODDER * np.median(shape))
    found = {
        "dark": (brightness < _DARK, 1 - brightness),
        "blurred": (relative < _BLURRED, 1 - relative),
        "tiny": (sizes < _TINY, 1 - sizes),
        "odd_shape": (is_odd, 1 - 1 / shape),
    }
    return {kind: {int(row): float(score[row]) for row in np.flatnonzero(has)} for kind, (has, score) in found.items()}


def find_outliers(features: torch.Tensor) -> dict[int, float]:
    """Return the rows of images that are far from all others, with their mean cosine distances to the nearest ten."""
    vectors = torch.nn.functional.normalize(features.float(), dim=1)
    count = min(_NEIGHBORS, len(vectors) - 1)
    nearest = [(part @ vectors.T).topk(count + 1, dim=1).values[:, 1:] for part in vectors.split(1024)]
    distances = 1 - torch.cat(nearest).mean(dim=1).numpy()  # without the image itself
    low, high = np.percentile(distances, [25, 75])
    far = np.flatnonzero(distances > high + _FAR * (high - low))
    return {int(row): float(distances[row]) for row in far}
