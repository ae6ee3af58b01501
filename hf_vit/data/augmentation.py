"""Training augmentation of the original: inception crop, flip, RandAugment, on one PIL image.

All randomness comes from the caller's generator, so that a sample does not depend on the number of worker processes.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from ..files.pictures import to_mode
from ..models.image_reading import load_image, read_image
from ..models.image_resizing import Filter, Window, crop_to, resize
from ..models.resize_weights import AREA, BILINEAR, shortest_edge_size
from .randaugment import randaugment

_ATTEMPTS = 100  # tries of TensorFlow's sampler before it takes the whole image
_RESIZE_SMALL = Filter(AREA, antialias=False, output="truncated", use_pillow=False)  # of big_vision


class Box(NamedTuple):
    """A crop in pixels."""

    top: int
    left: int
    height: int
    width: int

    @property
    def ranges(self) -> Window:
        """Its rows and columns."""
        return range(self.top, self.top + self.height), range(self.left, self.left + self.width)

    @property
    def edges(self) -> tuple[int, int, int, int]:
        """(left, top, right, bottom), as in `Image.crop`."""
        return self.left, self.top, self.left + self.width, self.top + self.height

    def scaled(self, down: float, across: float) -> "Box":
        """Return the same crop of an image whose height and width are scaled; each side is at least one pixel."""
        sides = max(round(self.height * down), 1), max(round(self.width * across), 1)
        return Box(int(self.top * down), int(self.left * across), *sides)


class Crop(NamedTuple):
    """A crop of an image: `box` is cut out and resized to `size`, (height, width), of which `window` is taken."""

    box: Box
    size: tuple[int, int]
    window: Box


@dataclass(frozen=True)
class TrainTransform:
    """Training augmentation: an image of any size and mode -> (height, width, channels) uint8.

    Args:
        size: (height, width) of the result, in pixels.
        crop: "inception", "random" (a window of `size` from the image squashed to `resize`), "resmall" (a window of
            `size` from the image whose shorter side becomes `resize[0]`) or "none" (squash).
        crop_area: smallest and largest area of an inception crop, as a share of the image's.
        resize: (height, width) before a random crop; raised to `size` if it is smaller.
        antialias: average pixels when shrinking; the original does not.
        reduced_decoding: decode a JPEG at 1/2, 1/4 or 1/8 of its size if the crop is still as large as `size`; only
            with crop "inception" or "none".
        mode: "RGB" or "L", of the result.
        background: red, green and blue behind transparent parts.
        jpeg_dct: cosine transform of JPEG files, that of the image processor.
    """

    size: tuple[int, int]
    crop: str = "inception"
    crop_area: tuple[float, float] = (0.05, 1.0)
    resize: tuple[int, int] | None = None
    flip: bool = True
    randaugment_layers: int = 0
    randaugment_magnitude: float = 0
    antialias: bool = False
    mode: str = "RGB"
    background: tuple[int, ...] = (255, 255, 255)
    reduced_decoding: bool = False
    jpeg_dct: str = "fast"

    def __call__(self, image: Image.Image, rng: np.random.Generator, crop: Crop | None = None) -> np.ndarray:
        """Augment an image; `crop` is given if it has already been drawn."""
        crop = crop or self.draw_crop(image.height, image.width, rng)
        image = self.resized_crop(to_mode(image, self.mode, self.background), crop)
        if self.draw_flip(rng):
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.randaugment_layers:
            image = randaugment(image, self.randaugment_layers, self.randaugment_magnitude, rng)
        return np.asarray(image).reshape(image.height, image.width, -1)

    def load(self, image: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Read an image, {"bytes", "path"}, and return the entries of its training sample.

        Raises:
            ImageReadingError: the image cannot be read.
        """
        if not self.reduced_decoding:
            return self.sample(load_image(image, name=image["path"], jpeg_dct=self.jpeg_dct), rng)
        drawn: list[tuple[Crop, int, int]] = []

        def reduce_to(height: int, width: int) -> tuple[int, int]:
            """Return the image size at which the crop is as large as the result."""
            crop = self.draw_crop(height, width, rng)
            drawn.append((crop, height, width))
            rows, columns = self.size
            return math.ceil(height * rows / crop.box.height), math.ceil(width * columns / crop.box.width)

        decoded = load_image(image, reduce_to, image["path"], self.jpeg_dct)
        crop, height, width = drawn[0]
        box = crop.box.scaled(decoded.height / height, decoded.width / width)
        return self.sample(decoded, rng, crop._replace(box=box))

    def sample(self, image: Image.Image, rng: np.random.Generator, crop: Crop | None = None) -> dict[str, np.ndarray]:
        """Return the entries of a training sample; `crop` is given if it has already been drawn."""
        return {"image": self(image, rng, crop)}

    def draw_flip(self, rng: np.random.Generator) -> bool:
        """Draw whether the image is mirrored."""
        return self.flip and rng.random() < 0.5

    def draw_crop(self, height: int, width: int, rng: np.random.Generator) -> Crop:
        """Draw the crop of an image of this size."""
        box = Box(0, 0, height, width)
        if self.crop == "inception":
            box = sample_inception_box(height, width, self.crop_area, rng=rng)
        if self.crop in ("inception", "none"):
            return Crop(box, self.size, Box(0, 0, *self.size))
        assert self.resize is not None
        if self.crop == "random":
            size = max(self.resize[0], self.size[0]), max(self.resize[1], self.size[1])
        else:
            size = shortest_edge_size(height, width, max(self.resize[0], *self.size), truncate=False)
        top, left = (int(rng.integers(side - window + 1)) for side, window in zip(size, self.size, strict=True))
        return Crop(box, size, Box(top, left, *self.size))

    def resized_crop(self, image: Image.Image, crop: Crop) -> Image.Image:
        """Return a crop of an image, resized."""
        if self.crop == "resmall":
            return _resize_and_crop(image, crop.size, crop.window)
        resized = crop_and_resize(image, crop.box, crop.size, self.antialias)
        return resized if crop.window == Box(0, 0, *crop.size) else resized.crop(crop.window.edges)


@dataclass(frozen=True)
class ArrayTransform(TrainTransform):
    """The augmentation of images with any number of channels, without RandAugment.

    Images with deeper levels than 8 bits become float32.
    """

    num_channels: int = 3

    def load(self, image: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the "image" (height, width, channels) of a training sample."""
        # (channels, height, width)
        levels = read_image(image, self.num_channels, self.background, name=image["path"], jpeg_dct=self.jpeg_dct)
        height, width = levels.shape[-2:]
        crop = self.draw_crop(height, width, rng)
        output = "float" if levels.is_floating_point() else "truncated"
        kind = AREA if self.crop == "resmall" else BILINEAR
        resize_filter = Filter(kind, self.antialias, output, use_pillow=False)
        pixels = resize(crop_to(levels, crop.box.ranges), crop.size, crop.window.ranges, resize_filter)
        if self.draw_flip(rng):
            pixels = pixels.flip(-1)
        return {"image": pixels.permute(1, 2, 0).contiguous().numpy()}


def _resize_and_crop(image: Image.Image, size: tuple[int, int], box: Box) -> Image.Image:
    """Resize to `size`, (height, width), as big_vision's `resize_small` does, and return the part in `box`."""
    levels = torch.from_numpy(np.array(image).reshape(image.height, image.width, -1)).permute(2, 0, 1)
    pixels = resize(levels, size, box.ranges, _RESIZE_SMALL)  # (channels, box.height, box.width)
    picture = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
    return Image.fromarray(picture.numpy())


def crop_and_resize(image: Image.Image, box: Box, size: tuple[int, int], antialias: bool = False) -> Image.Image:
    """Crop, then resize bilinearly with half-pixel centers and truncate to uint8, as `tf.image.resize` and `tf.cast`.

    PIL's `resize` always averages when it shrinks; its `transform` does not.
    """
    image = image.crop(box.edges)
    height, width = size
    if antialias:
        return image.resize((width, height), Image.Resampling.BILINEAR)
    if image.size == (width, height):
        return image
    return image.transform(
        (width, height), Image.Transform.EXTENT, (0, 0, box.width, box.height), Image.Resampling.BILINEAR
    )


def sample_inception_box(
    height: int,
    width: int,
    area: tuple[float, float] = (0.05, 1.0),
    ratio: tuple[float, float] = (0.75, 1.33),
    *,
    rng: np.random.Generator,
) -> Box:
    """Draw a random crop as `tf.image.sample_distorted_bounding_box` does.

    The aspect ratio (width over height) is uniform. Then the height is uniform among those with an allowed area.
    torchvision's RandomResizedCrop differs: its area is uniform and its ratio log-uniform.

    Args:
        area: smallest and largest area, as a share of the image's.
        ratio: smallest and largest width over height; TensorFlow's default, which all originals use.
    """
    for _ in range(_ATTEMPTS):
        size = _sample_crop_size(height, width, area, rng.uniform(*ratio), rng)
        if size is not None:
            top, left = (int(rng.integers(max(room, 1))) for room in (height - size[0], width - size[1]))
            return Box(top, left, *size)
    return Box(0, 0, height, width)


def _sample_crop_size(
    height: int, width: int, area: tuple[float, float], ratio: float, rng: np.random.Generator
) -> tuple[int, int] | None:
    """Draw (height, width) of a crop with this ratio; None if no size fits after rounding.

    Follows `GenerateRandomCrop` of tensorflow/core/kernels/image/sample_distorted_bounding_box_op.cc.
    """
    smallest, largest = (share * height * width for share in area)
    max_height = round(math.sqrt(largest / ratio))
    if round(max_height * ratio) > width:
        max_height = int((width + 0.5 - 1e-7) / ratio)
        max_height -= round(max_height * ratio) > width
    max_height = min(max_height, height)
    min_height = min(round(math.sqrt(smallest / ratio)), max_height)
    crop_height = int(rng.integers(min_height, max_height + 1))
    if crop_height * round(crop_height * ratio) < smallest:
        crop_height += 1
    if crop_height * round(crop_height * ratio) > largest:
        crop_height -= 1
    crop_width = round(crop_height * ratio)
    fits = smallest <= crop_height * crop_width <= largest and 0 < crop_width <= width and 0 < crop_height <= height
    return (crop_height, crop_width) if fits else None


def sample_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of one sample in one epoch."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch, index))))
