"""Augmentation whose pixels are computed on the device, from the same random numbers as `augmentation`'s.

A data worker decodes an image, draws what is random, and crops at full resolution (`CropTransform`). The
device resizes, flips and applies RandAugment, a batch at a time (`DeviceAugmentation`). The crops of a batch have
different sizes, so they are concatenated in "pixels", without padding; "first" and "sizes" say where each is.

The arithmetic is that of the path on the CPU, in the same order, so that the levels are the same: Pillow's bilinear
sampling is in float64, its blending in float32, and tables, sums and histograms are of integers. Without float64 (on
MPS) a sum near a whole number may be truncated to one level less.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from ..files.pictures import to_mode
from .augmentation import Crop, TrainTransform
from .devices import has_float64
from .randaugment import (
    FILL,
    GRAY_WEIGHTS,
    MOVES,
    NAMES,
    TABLES,
    Operation,
    cutout_padding,
    draw_operations,
    enhancement,
    level_of,
    move,
)

Batch = dict[str, torch.Tensor]

_LARGEST_CROP = 4  # times the size of the result; a worker resizes larger crops, which take longer to move
_PIXELS = 2**23  # of the results that are computed together: bounds the memory


@dataclass(frozen=True)
class CropTransform(TrainTransform):
    """The worker's part of the augmentation: random numbers and the crop, for `DeviceAugmentation`.

    Crops that are antialiased, taken after a resize, or much larger than the result are resized here.
    """

    def sample(self, image: Image.Image, rng: np.random.Generator, crop: Crop | None = None) -> dict[str, np.ndarray]:
        crop = crop or self.draw_crop(image.height, image.width, rng)
        image = to_mode(image, self.mode, self.background)
        is_large = crop.box.height * crop.box.width > _LARGEST_CROP * self.size[0] * self.size[1]
        if self.antialias or is_large or self.crop in ("random", "resmall"):
            image = self.resized_crop(image, crop)
        else:
            image = image.crop(crop.box.edges)
        pixels = np.asarray(image).reshape(image.height * image.width, -1)
        flipped = self.draw_flip(rng)
        operations = draw_operations(self.randaugment_layers, self.size, rng)
        return {
            "pixels": pixels,
            "sizes": np.array((image.height, image.width)),
            "flipped": np.array(flipped),
            "operations": np.array(operations, dtype=np.int64).reshape(-1, len(Operation._fields)),
        }


class DeviceAugmentation:
    """The device's part of the augmentation: turns a batch of `CropTransform` into one of `TrainTransform`.

    Nothing is read back from the device.
    """

    def __init__(self, transform: TrainTransform, device: torch.device):
        self.size, self.device = transform.size, device
        self.dtype = torch.float64 if has_float64(device) else torch.float32
        level = level_of(transform.randaugment_magnitude)
        self.image_weight = float(np.float32(enhancement(level)))
        self.padding = cutout_padding(level)
        height, width = transform.size
        same = np.arange(256)
        tables = [TABLES[name](level, height * width) if name in TABLES else same for name in NAMES]
        self.tables = torch.from_numpy(np.stack(tables).astype(np.uint8)).to(device)  # (operations, 256)
        signs = [[Operation(number, is_negative) for is_negative in (False, True)] for number in range(len(NAMES))]
        moves = np.stack([[move(operation, level, self.size) for operation in pair] for pair in signs])
        self.moves = torch.from_numpy(moves).to(device)  # (operations, directions, 2, 3)
        # Number of levels of a channel, less one -> factor of AutoContrast
        factors = [np.float32(255 / steps) for steps in range(1, 256)]
        self.factors = torch.tensor([1.0, *factors]).to(device)

    def __call__(self, batch: Batch) -> Batch:
        """Return a batch of the CPU with "image" (batch, height, width, channels) uint8, which is on the device."""
        batch = dict(batch)
        operations = batch["operations"]
        names = ("pixels", "first", "sizes", "flipped", "operations")
        pixels, *moved = (batch.pop(name).to(self.device, non_blocking=True) for name in names)
        together = max(_PIXELS // (self.size[0] * self.size[1]), 1)
        images = []
        parts = (tensor.split(together) for tensor in (*moved, operations))
        for *cuts, drawn, chosen in zip(*parts, strict=True):
            images.append(self.apply(self.resize(pixels, *cuts), drawn, chosen))
        return {**batch, "image": torch.cat(images)}

    def resize(
        self, pixels: torch.Tensor, first: torch.Tensor, sizes: torch.Tensor, flipped: torch.Tensor
    ) -> torch.Tensor:
        """Resize images bilinearly to (batch, height, width, channels), as `crop_and_resize`, and mirror some of them.

        Args:
            pixels: (pixels of all images, channels) uint8.
            first: (batch,) index of each image's first pixel.
            sizes: (batch, 2) height and width.
            flipped: (batch,) bool.
        """
        columns = self._neighbors(sizes[:, 1], axis=1)
        left, right, across = (torch.where(flipped[:, None], t.flip(1), t)[:, None] for t in columns)
        top, bottom, down = self._neighbors(sizes[:, 0], axis=0)
        rows = [(first[:, None] + y * sizes[:, 1:])[:, :, None] for y in (top, bottom)]  # (batch, height, 1)
        upper, lower = (_interpolate(pixels[row + left], pixels[row + right], across[..., None]) for row in rows)
        return _interpolate(upper, lower, down[:, :, None, None]).to(torch.uint8)

    def _neighbors(self, sides: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the two neighbors of each pixel of the result, and the weight of the second one.

        Each is (batch, side). The arithmetic is that of Pillow's affine transform with half-pixel centers.
        """
        dtype = self.dtype
        side = self.size[axis]
        centers = torch.arange(side, dtype=dtype, device=self.device) + 0.5
        # By a tensor, because CUDA multiplies by the rounded reciprocal of a number
        scales = sides.to(dtype) / torch.full_like(sides, side, dtype=dtype)
        positions = scales[:, None] * centers - 0.5
        before = positions.floor()
        last = sides[:, None] - 1
        numbers = before.long()
        return numbers.clamp(min=0).minimum(last), (numbers + 1).minimum(last), positions - before

    def apply(self, images: torch.Tensor, drawn: torch.Tensor, operations: torch.Tensor) -> torch.Tensor:
        """Apply RandAugment's operations to (batch, height, width, channels) uint8; the images may be changed.

        Args:
            drawn: (batch, layers, 4) fields of `Operation`, on the device.
            operations: the same on the CPU, which says which images are computed together.
        """
        functions = self._functions(images.shape[-1])
        numbers = operations[:, :, 0]
        kinds = torch.tensor([list(functions).index(_kind_of(name)) for name in NAMES])[numbers]  # (batch, layers)
        order = kinds.argsort(dim=0, stable=True).to(self.device, non_blocking=True)
        for layer in range(numbers.shape[1]):
            counts = kinds[:, layer].bincount(minlength=len(functions)).tolist()
            for function, chosen in zip(functions.values(), order[:, layer].split(counts), strict=True):
                if len(chosen):
                    images.index_copy_(0, chosen, function(images[chosen], drawn[chosen, layer].unbind(1)))
        return images

    def _functions(self, channels: int) -> dict[str, Callable[[torch.Tensor, tuple[torch.Tensor, ...]], torch.Tensor]]:
        """Kind of operation -> function of images and fields of `Operation`."""
        return {
            "table": lambda images, fields: _look_up(images, self.tables[fields[0]][:, None].expand(-1, channels, -1)),
            "AutoContrast": self._autocontrast,
            "Equalize": _equalize,
            "Color": self._color,
            "Sharpness": lambda images, fields: self._blend(_smooth(images), images),
            "Cutout": self._cutout,
            "move": self._move_pixels,
        }

    def _autocontrast(self, images: torch.Tensor, fields: tuple[torch.Tensor, ...]) -> torch.Tensor:
        low, high = images.amin((1, 2)).long(), images.amax((1, 2)).long()  # (batch, channels)
        factor = self.factors[high - low][..., None]
        levels = torch.arange(256, device=self.device)
        tables = (levels * factor - low[..., None] * factor).clamp(0, 255).to(torch.uint8)
        return _look_up(images, torch.where((high > low)[..., None], tables, levels.to(torch.uint8)))

    def _color(self, images: torch.Tensor, fields: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if images.shape[-1] == 1:
            return images
        red, green, blue = (weight * band for weight, band in zip(GRAY_WEIGHTS, images.float().unbind(-1), strict=True))
        gray = (red + green + blue - 0.5 + 0.5).clamp(0, 255).to(torch.uint8)
        return self._blend(gray[..., None], images)

    def _blend(self, plain: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """`Image.blend`, in float32."""
        blended = images.float().sub_(plain).mul_(self.image_weight).add_(plain)
        return blended.clamp_(0, 255).to(torch.uint8)

    def _cutout(self, images: torch.Tensor, fields: tuple[torch.Tensor, ...]) -> torch.Tensor:
        _, _, x, y = (field[:, None] for field in fields)
        rows, columns = (torch.arange(side, device=self.device) for side in self.size)
        is_row = (rows >= y - self.padding) & (rows < y + self.padding)  # (batch, height)
        is_column = (columns >= x - self.padding) & (columns < x + self.padding)
        return images.masked_fill((is_row[:, :, None] & is_column[:, None])[..., None], FILL)

    def _move_pixels(self, images: torch.Tensor, fields: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Take the nearest pixels, as `_take_nearest` of `randaugment`."""
        height, width = self.size
        (a, b, c), (d, e, f) = (row.unbind(1) for row in self.moves[fields[0], fields[1]][..., None, None].unbind(1))
        x = torch.arange(width, dtype=torch.float32, device=self.device)
        y = torch.arange(height, dtype=torch.float32, device=self.device)[:, None]
        from_x = a * x + b * y + c + 0.5  # (batch, height, width)
        from_y = d * x + e * y + f + 0.5
        outside = (from_x <= 0) | (from_x >= width) | (from_y <= 0) | (from_y >= height)
        numbers = from_y.int().long() * width + from_x.int()
        numbers = numbers.clamp(0, height * width - 1).flatten(1)[..., None].expand(-1, -1, images.shape[-1])
        return images.flatten(1, 2).gather(1, numbers).view_as(images).masked_fill(outside[..., None], FILL)


def _kind_of(name: str) -> str:
    if name in TABLES:
        return "table"
    return "move" if name in MOVES else name


def _interpolate(before: torch.Tensor, after: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return before + (after - before) * weight, each step rounded by itself."""
    return after.to(weight.dtype).sub_(before).mul_(weight).add_(before)


def _look_up(images: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Map the levels of (batch, height, width, channels) by tables (batch, channels, 256)."""
    return tables.flatten().take(_table_index(images))


def _table_index(images: torch.Tensor) -> torch.Tensor:
    """Index of each value's level in (batch, channels, 256)."""
    count, _, _, channels = images.shape
    first = torch.arange(count * channels, device=images.device).view(count, 1, 1, channels) * 256
    return first + images


def _equalize(images: torch.Tensor, fields: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """`ImageOps.equalize`: spread the levels of each channel so that all are equally frequent."""
    count, _, _, channels = images.shape
    index = _table_index(images).flatten()
    histogram = torch.zeros(count * channels * 256, dtype=torch.int32, device=images.device)
    histogram = histogram.scatter_add_(0, index, torch.ones_like(index, dtype=torch.int32)).view(count, channels, 256)
    levels = torch.arange(256, device=images.device)
    highest = images.amax((1, 2)).long()[..., None]
    step = (histogram.sum(2, keepdim=True) - histogram.gather(2, highest)) // 255
    before = histogram.cumsum(2) - histogram
    tables = ((step // 2 + before) // step.clamp(min=1)).clamp(max=255)
    return _look_up(images, torch.where(step > 0, tables, levels).to(torch.uint8))


def _smooth(images: torch.Tensor) -> torch.Tensor:
    """Mean of 3 x 3 pixels, truncated; the middle one has weight 5, and border pixels are unchanged."""
    levels = images.to(torch.int16)
    rows = levels[:, :-2] + levels[:, 1:-1] + levels[:, 2:]
    sums = rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * levels[:, 1:-1, 1:-1]
    smooth = images.clone()
    smooth[:, 1:-1, 1:-1] = (sums // 13).to(torch.uint8)
    return smooth
