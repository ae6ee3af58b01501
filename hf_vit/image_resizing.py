"""Resizing as TensorFlow and as Pillow do it, on tensors (..., channels, height, width) of levels from 0 to 255.

The original evaluated its models with TensorFlow's resize, whose arithmetic (float32, half-pixel centres) is written
out here and runs on whatever device the tensor is. Other libraries evaluate with Pillow's filters: these are Pillow's
own or, for speed and on other devices, PyTorch's, which differ from them by at most one level.
"""

from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate, pad

AREA = "area"  # TensorFlow's area resize; Pillow's box filter is another one
BILINEAR, BICUBIC = Image.Resampling.BILINEAR.value, Image.Resampling.BICUBIC.value
TORCH_MODES = {BILINEAR: "bilinear", BICUBIC: "bicubic"}

Window = tuple[range, range]  # rows and columns of an image


class Filter(NamedTuple):
    """How to resize.

    Fields:
        resample: "area", or a `PIL.Image.Resampling`.
        antialias: whether the filter widens when the image shrinks; without there is bilinear alone.
        output: "float" (float32, as TensorFlow returns it), "truncated" (that cast to uint8 as TensorFlow casts,
            downwards) or "rounded" (uint8, rounded after each axis, as Pillow does).
        use_pillow: whether "rounded" is computed by Pillow, on the CPU, or by PyTorch.
    """

    resample: Any
    antialias: bool
    output: str
    use_pillow: bool


def resize(levels: torch.Tensor, size: tuple[int, int], window: Window, how: Filter) -> torch.Tensor:
    """Resize to `size`, (height, width), and return the part of it that is in `window`.

    Args:
        levels: (..., channels, old height, old width), uint8 or float32.

    Returns:
        (..., channels, rows, columns) of the window, float32 or uint8.
    """
    if how.output == "rounded":
        levels = levels.round().to(torch.uint8) if levels.is_floating_point() else levels
        if how.use_pillow:
            return resize_with_pillow(levels, size, window, how.resample)
        return cut(resize_with_torch(levels, size, how.resample), window)
    if how.resample == AREA:
        resized = resize_area(levels, size, window)
    elif how.antialias:
        resized = cut(interpolate_images(levels.float(), size, how.resample), window)
    else:
        resized = resize_bilinear(levels, size, window)
    return resized if how.output == "float" else resized.to(torch.uint8)


def shortest_edge_size(height: int, width: int, side: int, truncate: bool) -> tuple[int, int]:
    """(height, width) of an image whose shorter side becomes `side`.

    The other is truncated, as in torchvision's `Resize`, or rounded half to even from a float32 ratio, as in
    big_vision's `resize_small`.
    """
    short = min(height, width)
    if truncate:
        return side if height == short else side * height // short, side if width == short else side * width // short
    ratio = np.float32(side) / np.float32(short)
    return int(np.rint(np.float32(height) * ratio)), int(np.rint(np.float32(width) * ratio))


def center_window(size: tuple[int, int], crop_size: tuple[int, int], round_half: bool) -> Window:
    """The middle of an image, at most all of it.

    Of an odd rest, the larger half is cut from the end in big_vision's `central_crop`; torchvision's `CenterCrop`
    rounds the half to even (`round_half`).
    """
    ranges = []
    for old, new in zip(size, crop_size, strict=True):
        start = max(0, round((old - new) / 2) if round_half else (old - new) // 2)
        ranges.append(range(start, start + min(old, new)))
    return ranges[0], ranges[1]


def cut(levels: torch.Tensor, window: Window) -> torch.Tensor:
    rows, columns = window
    return levels[..., rows.start : rows.stop, columns.start : columns.stop]


def pad_to(levels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Black around an image that is smaller; an odd rest goes to the end of the axis."""
    down, across = height - levels.shape[-2], width - levels.shape[-1]
    if down == 0 and across == 0:
        return levels
    return pad(levels, (across // 2, across - across // 2, down // 2, down - down // 2))


# As TensorFlow does it


@lru_cache(maxsize=512)
def bilinear_taps(old: int, new: int, part: range, values: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """For each of `part` of `new` pixels: its two neighbours among `old` ones, and the weight of the second.

    Half-pixel centres without antialiasing: `tf.image.resize(method="bilinear")`, in its float32 arithmetic. Each is
    repeated for the `values` that a pixel has, see `spread`.
    """
    scale = np.float32(old) / np.float32(new)
    position = (np.arange(part.start, part.stop, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    below = np.floor(position)
    first, second = spread(np.maximum(below, 0), values), spread(np.minimum(np.ceil(position), old - 1), values)
    return first.to(device), second.to(device), torch.from_numpy((position - below).repeat(values)).to(device)


@lru_cache(maxsize=512)
def area_taps(
    old: int, new: int, part: range, values: int, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each of `part` of `new` pixels: the `old` ones that it covers, one after the other, and how much of each.

    `tf.image.resize(method="area")`, in its float32 arithmetic. Each is repeated for the `values` that a pixel has.
    """
    scale = np.float32(old) / np.float32(new)
    start = np.arange(part.start, part.stop, dtype=np.float32) * scale
    end = np.arange(part.start + 1, part.stop + 1, dtype=np.float32) * scale
    taps = []
    for tap in range(int((np.ceil(end) - np.floor(start)).max())):
        left = np.floor(start) + np.float32(tap)
        covered = np.minimum(left + 1, end) - np.maximum(left, start)
        covered = np.where((left < start) & (left + 1 > end), scale, covered)
        weight = np.where(left < np.ceil(end), covered, np.float32(0)).repeat(values)
        taps.append((spread(np.minimum(left, old - 1), values).to(device), torch.from_numpy(weight).to(device)))
    return taps


def spread(pixels: np.ndarray, values: int) -> torch.Tensor:
    """Numbers of pixels -> numbers of their values: [0, 2] -> [0, 1, 2, 6, 7, 8] for three values in each pixel."""
    return torch.from_numpy((pixels.astype(np.int64)[:, None] * values + np.arange(values)).flatten())


def resize_bilinear(levels: torch.Tensor, size: tuple[int, int], window: Window) -> torch.Tensor:
    """TensorFlow's bilinear resize without antialiasing: float32, not rounded. Blends in its order, left with right
    before top with bottom, since the sums may be truncated later."""
    rows, values = rows_of_values(levels)
    above, below, down = bilinear_taps(levels.shape[-2], size[0], window[0], 1, levels.device)
    left, right, across = bilinear_taps(levels.shape[-1], size[1], window[1], values, levels.device)
    top, bottom = (
        blend(take_columns(row, left), take_columns(row, right), across)
        for row in (rows.index_select(-2, numbers).float() for numbers in (above, below))
    )
    return images_of_values(blend(top, bottom, down[:, None]), values)


def resize_area(levels: torch.Tensor, size: tuple[int, int], window: Window) -> torch.Tensor:
    """TensorFlow's area resize: float32, not rounded. Sums in its order, since the sums may be truncated later."""
    rows, values = rows_of_values(levels)
    down = area_taps(levels.shape[-2], size[0], window[0], 1, levels.device)
    across = area_taps(levels.shape[-1], size[1], window[1], values, levels.device)
    rows = rows.float()
    rows = reduce(torch.Tensor.add_, (take_columns(rows, numbers).mul_(weight) for numbers, weight in across))
    rows = reduce(torch.Tensor.add_, (rows.index_select(-2, numbers).mul_(weight[:, None]) for numbers, weight in down))
    scales = [np.float32(old) / np.float32(new) for old, new in zip(levels.shape[-2:], size, strict=True)]
    return images_of_values(rows.mul_(float(np.float32(1) / (scales[0] * scales[1]))), values)


def blend(first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """first + (second - first) * weight, rounded in this order (`torch.lerp` has another); overwrites `second`."""
    return second.sub_(first).mul_(weight).add_(first)


def take_columns(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """`rows.index_select(-1, numbers)`, which is several times faster on a matrix."""
    return rows.reshape(-1, rows.shape[-1]).index_select(1, numbers).view(*rows.shape[:-1], -1)


def rows_of_values(levels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(..., channels, height, width) -> (..., height, width * values), values: the channels of a pixel stay together
    where they do so in memory, as in a decoded image; else each channel has rows of its own."""
    if levels.shape[-3] > 1 and levels.stride(-3) == 1:
        return levels.movedim(-3, -1).flatten(-2), levels.shape[-3]
    return levels, 1


def images_of_values(rows: torch.Tensor, values: int) -> torch.Tensor:
    """The way back from `rows_of_values`."""
    return rows if values == 1 else rows.unflatten(-1, (-1, values)).movedim(-1, -3)


# As Pillow does it


def resize_with_pillow(levels: torch.Tensor, size: tuple[int, int], window: Window, resample: int) -> torch.Tensor:
    """The window of `PIL.Image.resize` of uint8 (..., channels, height, width)."""
    if levels.ndim > 3:
        return torch.stack([resize_with_pillow(image, size, window, resample) for image in levels])
    if levels.shape[0] not in (1, 3):  # Pillow would take 2 and 4 channels for colour and alpha
        return torch.cat([resize_with_pillow(channel[None], size, window, resample) for channel in levels])
    pixels = levels.movedim(0, -1).cpu().numpy()
    image = Image.fromarray(pixels.squeeze(-1) if levels.shape[0] == 1 else pixels)
    rows, columns = window
    resized = image.resize((size[1], size[0]), resample).crop((columns.start, rows.start, columns.stop, rows.stop))
    return torch.from_numpy(np.array(resized).reshape(resized.height, resized.width, -1)).movedim(-1, 0)


def resize_with_torch(levels: torch.Tensor, size: tuple[int, int], resample: int) -> torch.Tensor:
    """PyTorch's counterpart of Pillow's filters for uint8 (..., channels, height, width)."""
    if levels.device.type == "cpu":
        return interpolate_images(levels, size, resample)
    for step in ((levels.shape[-2], size[1]), size):  # as Pillow rounds and clips: after the width, after the height
        levels = interpolate_images(levels.float(), step, resample).round().clamp(0, 255)
    return levels.to(torch.uint8)


def interpolate_images(levels: torch.Tensor, size: tuple[int, int], resample: int) -> torch.Tensor:
    """`interpolate` with antialiasing, also of an image without a batch dimension."""
    if resample not in TORCH_MODES:
        raise ValueError(f"PyTorch resizes with resample {sorted(TORCH_MODES)}, not {resample}, which needs Pillow")
    batch = levels if levels.ndim == 4 else levels[None]
    resized = interpolate(batch, size=size, mode=TORCH_MODES[resample], antialias=True)
    return resized if levels.ndim == 4 else resized[0]
