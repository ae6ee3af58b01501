"""TensorFlow's and Pillow's resize methods for tensors (..., channels, height, width) of levels from 0 to 255.

The original code uses TensorFlow's resize; other libraries use Pillow's filters. Both are implemented here in their
own arithmetic, float32 and fixed-point, so that the results are bit-identical on any device. Pillow itself can be used
too; it is faster for large images.
"""

import math
from functools import lru_cache, reduce
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
from PIL import Image
from torch.nn.functional import pad

from .resize_weights import AREA, area_weights, bilinear_weights, filter_weights

PILLOW_BITS = 32 - 8 - 2  # fractional bits of a weight in Pillow: 8 bits are for the level, 2 for overflow and sign
_BLOCK = 128  # number of rows of a large image to process at a time, so that they stay in the CPU's cache

Window = tuple[range, range]  # rows and columns of an image
_Taps = list[tuple[torch.Tensor, torch.Tensor]]  # (indices, weights) of each filter tap, in the order of summation


class Filter(NamedTuple):
    """Filter of a resize.

    Args:
        resample: "area", or a number of `PIL.Image.Resampling`.
        antialias: widen the filter when the image shrinks; False needs bilinear or area.
        output: "float" (float32, as in TensorFlow), "truncated" (rounded down to uint8, as in TensorFlow) or "rounded"
            (rounded to uint8 after each axis, as in Pillow).
        use_pillow: compute "rounded" with Pillow, on the CPU.
    """

    resample: Any
    antialias: bool
    output: str
    use_pillow: bool


class _Axis(NamedTuple):
    """Resize of the height or the width.

    Args:
        old, new: pixels of the image, and of the whole resized image.
        part: pixels of the resized image to compute.
        values: number of adjacent values per pixel, see `_to_rows`.
        device: device of the image.
    """

    old: int
    new: int
    part: range
    values: int
    device: torch.device

    @property
    def scale(self) -> np.float32:
        """Pixels of the image per pixel of the resized image, in TensorFlow's precision."""
        return np.float32(self.old) / np.float32(self.new)


def resize(levels: torch.Tensor, size: tuple[int, int], window: Window, resize_filter: Filter) -> torch.Tensor:
    """Resize images to `size` and return the part inside `window`.

    Args:
        levels: (..., channels, old height, old width), uint8 or float32.
        size: (height, width) of the whole resized image.
        window: rows and columns of the resized image to compute.
        resize_filter: the filter and the rounding.

    Returns:
        (..., channels, rows, columns) of the window, float32 or uint8.
    """
    resample, antialias, output, use_pillow = resize_filter
    if output == "rounded" and levels.is_floating_point():
        levels = levels.round().to(torch.uint8)
    if output == "rounded" and use_pillow:
        return _resize_with_pillow(levels, size, window, resample)
    rows, values = _to_rows(levels)
    down = _Axis(levels.shape[-2], size[0], window[0], 1, levels.device)
    across = _Axis(levels.shape[-1], size[1], window[1], values, levels.device)
    if output == "rounded":
        rows = _resize_like_pillow(rows, down, across, resample)
    elif resample == AREA:  # like TensorFlow's, summed in the same order
        rows = _sum_rows(_sum_columns(rows, _area_taps(across)), _area_taps(down))
        rows.mul_(float(np.float32(1) / (down.scale * across.scale)))
    elif antialias:  # like TensorFlow's; levels agree within 0.001
        rows = _sum_rows(_sum_columns(rows, _filter_taps(across, resample)), _filter_taps(down, resample))
    else:
        rows = _resize_bilinear(rows, down, across)
    resized = rows if values == 1 else rows.unflatten(-1, (values, -1)).movedim(-2, -3)  # ordered by channel
    return resized if output == "float" else resized.to(torch.uint8)


@lru_cache(maxsize=4096)
def fit_grid(height: int, width: int, patch_size: tuple[int, int], max_num_patches: int) -> tuple[int, int]:
    """Return (rows, columns) of patches at the largest scale with at most `max_num_patches` patches.

    At scale s, an image has ceil(s * height / patch height) rows and ceil(s * width / patch width) columns. The largest
    valid scale makes one of these an integer before rounding, so it is enough to try every number of rows and columns.
    """
    patch_height, patch_width = patch_size
    best = (1, 1)
    for number in count(1):
        columns = -(-number * patch_height * width // (height * patch_width))  # with this number of rows
        rows = -(-number * patch_width * height // (width * patch_height))  # with this number of columns
        grids = [(number, columns), (rows, number)]
        fitting = [grid for grid in grids if math.prod(grid) <= max_num_patches]
        if not fitting:
            break
        best = max(best, *fitting)
    return best


def clip_window(window: Window, size: tuple[int, int]) -> Window:
    """Return the part of a window inside an image of `size`, (height, width)."""
    rows, columns = (range(max(part.start, 0), min(part.stop, side)) for part, side in zip(window, size, strict=True))
    return rows, columns


def crop_to(levels: torch.Tensor, window: Window) -> torch.Tensor:
    """Return the part of images (..., channels, height, width) inside a window."""
    rows, columns = window
    return levels[..., rows.start : rows.stop, columns.start : columns.stop]


def pad_to(levels: torch.Tensor, window: Window, size: tuple[int, int]) -> torch.Tensor:
    """Add the black borders of a window that exceeds the image.

    Args:
        levels: (..., channels, rows, columns), the part of the window inside the image.
        window: rows and columns; negative numbers are above and left of the image.
        size: (height, width) of the image.
    """
    (rows, columns), (height, width) = window, size
    borders = [-columns.start, columns.stop - width, -rows.start, rows.stop - height]
    borders = [max(border, 0) for border in borders]
    return pad(levels, borders) if any(borders) else levels


# The resize methods, for images as rows, see `_to_rows`.


def _resize_bilinear(rows: torch.Tensor, down: _Axis, across: _Axis) -> torch.Tensor:
    """Resize like TensorFlow's bilinear resize without antialiasing: float32, not rounded.

    Left is blended with right, then top with bottom. This is TensorFlow's order, on which a later truncation depends.
    """
    used, above, below, weight = _bilinear_rows(down)
    rows = _take_rows(rows, used).float()
    left, right, weight_right = _bilinear_taps(across)
    rows = blend(_take_columns(rows, left), _take_columns(rows, right), weight_right)
    return blend(_take_rows(rows, above), _take_rows(rows, below), weight[:, None])


def _resize_like_pillow(rows: torch.Tensor, down: _Axis, across: _Axis, resample: int) -> torch.Tensor:
    """Resize like `PIL.Image.resize` for uint8, with the same fixed-point arithmetic; bit-identical."""
    passes = [(_sum_columns, across), (_sum_rows, down)]
    if pillow_resizes_rows_first(down, across):
        passes.reverse()
    for add_up, axis in passes:
        sums = add_up(rows, _filter_taps(axis, resample, fixed_point=True))
        rows = sums.add_(1 << (PILLOW_BITS - 1)).bitwise_right_shift_(PILLOW_BITS).clamp_(0, 255)
    return rows


def pillow_resizes_rows_first(down: Any, across: Any) -> Any:
    """Return whether the installed Pillow resizes the height first; the result is rounded after each pass.

    Pillow 13 does if it removes more than twice as many rows as columns (found by comparing 1,500 sizes), Pillow 12.2
    only for narrow images.

    Args:
        down, across: height and width, with pixels `old` and `new`, which are numbers or tensors.
    """
    if int(PIL.__version__.partition(".")[0]) >= 13:
        is_tall = 2 * (across.old - across.new) < down.old - down.new
    else:
        is_tall = down.old > 100 * across.old
    return is_tall & (down.new < down.old)


def _resize_with_pillow(levels: torch.Tensor, size: tuple[int, int], window: Window, resample: int) -> torch.Tensor:
    """Resize with `PIL.Image.resize`."""
    if levels.ndim > 3:
        return torch.stack([_resize_with_pillow(image, size, window, resample) for image in levels])
    if levels.shape[0] not in (1, 3):  # Pillow would treat the last of 2 or 4 channels as alpha
        return torch.cat([_resize_with_pillow(channel[None], size, window, resample) for channel in levels])
    pixels = levels.movedim(0, -1).cpu().numpy()
    if levels.shape[0] == 1:
        pixels = pixels.squeeze(-1)
    image = Image.fromarray(pixels)
    rows, columns = window
    resized = image.resize((size[1], size[0]), resample).crop((columns.start, rows.start, columns.stop, rows.stop))
    return torch.from_numpy(np.array(resized).reshape(resized.height, resized.width, -1)).movedim(-1, 0)


# Indices and weights of the pixels of an axis. The indices are those of values in a row, see `value_indices`.


@lru_cache(maxsize=512)
def _bilinear_taps(axis: _Axis) -> tuple[torch.Tensor, ...]:
    """Return indices of the two neighbors, and the weight of the second."""
    first, second, weight = bilinear_weights(axis.old, axis.new, axis.part)
    taps = value_indices(first, axis.values), value_indices(second, axis.values), np.tile(weight, axis.values)
    return tuple(torch.as_tensor(tap, device=axis.device) for tap in taps)


@lru_cache(maxsize=512)
def _bilinear_rows(axis: _Axis) -> tuple[torch.Tensor, ...]:
    """Return the indices of the rows that are used, and `_bilinear_taps` with indices into these rows."""
    first, second, weight = _bilinear_taps(axis._replace(device=torch.device("cpu")))
    used, (first, second) = torch.stack([first, second]).unique(return_inverse=True)
    return tuple(tensor.to(axis.device) for tensor in (used, first, second, weight))


@lru_cache(maxsize=512)
def _area_taps(axis: _Axis) -> _Taps:
    return _to_taps(axis, *area_weights(axis.old, axis.new, axis.part))


@lru_cache(maxsize=512)
def _filter_taps(axis: _Axis, resample: int, fixed_point: bool = False) -> _Taps:
    """Return the taps of an antialiasing filter, in float32 or in Pillow's int32 with `PILLOW_BITS` fractional bits."""
    pixels, weights = filter_weights(axis.old, axis.new, axis.part, resample)
    if not fixed_point:
        return _to_taps(axis, pixels, weights.astype(np.float32))
    scaled = weights * 2.0**PILLOW_BITS
    return _to_taps(axis, pixels, (scaled + np.copysign(0.5, scaled)).astype(np.int32))


def _to_taps(axis: _Axis, pixels: np.ndarray, weights: np.ndarray) -> _Taps:
    """Convert arrays (pixels of `axis.part`, taps) of pixel indices and weights to one pair of tensors per tap."""
    indices = [value_indices(pixel, axis.values).to(axis.device) for pixel in pixels.T]
    repeated = [torch.from_numpy(np.tile(weight, axis.values)).to(axis.device) for weight in weights.T]
    return list(zip(indices, repeated, strict=True))


def value_indices(pixels: np.ndarray, values: int) -> torch.Tensor:
    """Convert pixel indices to the indices of their values in a row, ordered by channel.

    With three values per pixel, [0, 2] becomes [0, 6, 1, 7, 2, 8].
    """
    return torch.from_numpy((pixels * values + np.arange(values)[:, None]).flatten())


# Operations on rows


def _to_rows(levels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Convert images (..., channels, height, width) to rows without copying.

    Returns:
        If the channels of a pixel are adjacent in memory, as in a decoded image: rows (..., height, width * channels),
        and the number of channels. Otherwise: the images (..., channels, height, width), and 1.
    """
    if levels.shape[-3] > 1 and levels.stride(-3) == 1:
        return levels.movedim(-3, -1).flatten(-2), levels.shape[-3]
    return levels, 1


def blend(first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute first + (second - first) * weight; `second` is overwritten. `torch.lerp` rounds differently."""
    return second.sub_(first).mul_(weight).add_(first)


def _sum_columns(rows: torch.Tensor, taps: _Taps) -> torch.Tensor:
    dtype = taps[0][1].dtype
    is_large = rows.device.type == "cpu" and rows.shape[-2] > 4 * _BLOCK
    sums = []
    for block in rows.split(_BLOCK, dim=-2) if is_large else [rows]:
        block = block.to(dtype)
        terms = (_take_columns(block, indices).mul_(weights) for indices, weights in taps)
        sums.append(reduce(torch.Tensor.add_, terms))
    return torch.cat(sums, dim=-2) if is_large else sums[0]


def _sum_rows(rows: torch.Tensor, taps: _Taps) -> torch.Tensor:
    terms = (_take_rows(rows, indices).to(weights.dtype).mul_(weights[:, None]) for indices, weights in taps)
    return reduce(torch.Tensor.add_, terms)


def _take_rows(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return rows.index_select(-2, indices)


def _take_columns(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Compute `rows.index_select(-1, indices)` on a float32 matrix, for which PyTorch is several times faster."""
    matrix = rows.reshape(-1, rows.shape[-1]).view(torch.float32)  # copies the bits, also of int32
    return matrix.index_select(1, indices).view(rows.dtype).view(*rows.shape[:-1], -1)
