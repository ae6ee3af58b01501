"""Resampling as TensorFlow, as Pillow and as PyTorch do it, on tensors (..., channels, height, width).

The original evaluated its models with TensorFlow's resize, whose arithmetic (float32, half-pixel centres) is written
out here and runs wherever the tensor is. Pillow's filters, which other libraries evaluate with, are Pillow's own on
the CPU and PyTorch's on other devices; the two differ by at most one level.
"""

from functools import lru_cache

import numpy as np
import torch


@lru_cache(maxsize=256)
def bilinear_taps(old: int, new: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each of `new` pixels: its two neighbours among `old` ones, and the weight of the second.

    Half-pixel centres without antialiasing: `tf.image.resize(method="bilinear")`, in its float32 arithmetic.
    """
    scale = np.float32(old) / np.float32(new)
    position = (np.arange(new, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    below = np.floor(position)
    first = torch.from_numpy(np.maximum(below, 0).astype(np.int64))
    second = torch.from_numpy(np.minimum(np.ceil(position), old - 1).astype(np.int64))
    return first, second, torch.from_numpy(position - below)


def resize_bilinear(levels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """TensorFlow's bilinear resize without antialiasing: float32, not rounded."""
    if levels.stride(-3) == 1:  # decoded images have their channels last: rows of (width, channels)
        return resize_bilinear_rows(levels.movedim(-3, -1), height, width).movedim(-1, -3)
    return resize_bilinear_rows(levels.unsqueeze(-1), height, width).squeeze(-1)


def resize_bilinear_rows(pixels: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(..., old height, old width, values) -> (..., height, width, values)."""
    old_height, old_width, values = pixels.shape[-3:]
    first, second, weight = (tap.to(pixels.device) for tap in bilinear_taps(old_height, height))
    top, bottom = (pixels.index_select(-3, rows).float() for rows in (first, second))
    rows = blend(top, bottom, weight[:, None, None]).flatten(-2)  # (..., height, old width * values)

    first, second, weight = (tap.to(pixels.device) for tap in bilinear_taps(old_width, width))
    offsets = torch.arange(values, device=pixels.device)
    left, right = (rows.index_select(-1, (taps[:, None] * values + offsets).flatten()) for taps in (first, second))
    return blend(left, right, weight.repeat_interleave(values)).unflatten(-1, (width, values))


def blend(first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """first + (second - first) * weight, in this order of rounding (`torch.lerp` has another); overwrites `second`."""
    return second.sub_(first).mul_(weight).add_(first)
