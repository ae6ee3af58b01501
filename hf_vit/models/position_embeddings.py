"""Position embeddings added to the input: fixed and learned ones, and their resampling for other image sizes.

`HfViTConfig.position_interpolation` chooses the resampling method.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .pretrained import is_tracing
from .sizes import Grid, is_same_grid


def sincos2d(grid: Grid, hidden_size: int, temperature: float = 10_000.0) -> torch.Tensor:
    """Compute MoCo v3's fixed 2-D sine-cosine position embeddings, in the order of big_vision's `posemb_sincos_2d`.

    Args:
        grid: (rows, columns)
        temperature: the largest wavelength divided by 2 pi.

    Returns:
        (1, rows * columns, hidden_size): sines and cosines of the column, then of the row; float64, on the CPU.
    """
    omega = temperature ** -torch.linspace(0, 1, hidden_size // 4, dtype=torch.float64)
    row, column = torch.meshgrid(*(torch.arange(size, dtype=torch.float64) for size in grid), indexing="ij")
    row = row.reshape(-1, 1) * omega  # (rows * columns, hidden_size / 4)
    column = column.reshape(-1, 1) * omega
    return torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], dim=1).unsqueeze(0)


def cached_on_device(compute: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """Decorate a function of sizes to cache its tensors on each device, so that no forward pass waits for a transfer.

    The decorated function has another argument, `like`: a tensor whose dtype and device the results take. While
    torch.compile or an export traces the model, nothing is cached.
    """

    @lru_cache(maxsize=64)
    @torch.inference_mode(False)
    def cached(device: torch.device, dtype: torch.dtype, *arguments: Any) -> list[torch.Tensor]:
        return [tensor.to(device, dtype) for tensor in compute(*arguments)]

    @wraps(compute)
    def wrapper(*arguments: Any, like: torch.Tensor) -> list[torch.Tensor]:
        if is_tracing() or type(like) not in (torch.Tensor, nn.Parameter):  # a symbolic tensor must not be cached
            return [tensor.to(like) for tensor in compute(*arguments)]
        return cached(like.device, like.dtype, *arguments)

    return wrapper


@cached_on_device
def fixed_positions(grid: Grid, hidden_size: int) -> list[torch.Tensor]:
    """Return `sincos2d`, a list of one tensor (1, rows * columns, hidden_size)."""
    return [sincos2d(grid, hidden_size)]


def resize_position_embeddings(
    position_embeddings: torch.Tensor, old_grid: Grid, new_grid: Grid, num_prefix_tokens: int, method: str = "jax"
) -> torch.Tensor:
    """Resample learned position embeddings from one grid of patches to another.

    The computation is in float32, or in float64 for float64 embeddings. Embeddings of prefix tokens do not change.

    Args:
        position_embeddings: (tables, num_prefix_tokens + old_rows * old_columns, hidden_size)
        old_grid, new_grid: (rows, columns) of patches.
        num_prefix_tokens: number of embeddings before those of the patches.
        method: "jax": bilinear with aligned corners, as `scipy.ndimage.zoom(order=1)` in `interpolate_posembed`
            (google-research/vision_transformer, vit_jax/checkpoint.py). "jax_exact": the same, with that function's
            rounding error, see `_linear_weights`. "bilinear", "bicubic": half-pixel centers, antialiased, as in timm.
            "bicubic_aliased": not antialiased, as in transformers. "bicubic_aligned": the same with aligned corners, as
            `interpolate_embeddings` of torchvision (models/vision_transformer.py).

    Returns:
        (tables, num_prefix_tokens + new_rows * new_columns, hidden_size), in the dtype of the input.

    Raises:
        ValueError: the number of embeddings does not match `old_grid`.
    """
    if is_same_grid(old_grid, new_grid):
        return position_embeddings
    dtype = position_embeddings.dtype
    check_length(position_embeddings, num_prefix_tokens + old_grid[0] * old_grid[1])
    prefix, patches = position_embeddings.split([num_prefix_tokens, old_grid[0] * old_grid[1]], dim=1)
    patches = patches.to(torch.promote_types(dtype, torch.float32)).unflatten(1, old_grid)
    if method in ("jax", "jax_exact"):
        rows, columns = _linear_weights(tuple(old_grid), tuple(new_grid), method, like=patches)
        patches = torch.einsum("rh,cw,bhwd->brcd", rows, columns, patches)
    else:
        patches = patches.permute(0, 3, 1, 2)  # (tables, hidden_size, old_rows, old_columns)
        mode = method.partition("_")[0]
        is_aligned = method == "bicubic_aligned"
        is_antialiased = method in ("bilinear", "bicubic")
        patches = F.interpolate(patches, size=new_grid, mode=mode, align_corners=is_aligned, antialias=is_antialiased)
        patches = patches.permute(0, 2, 3, 1)
    return torch.cat([prefix, patches.flatten(1, 2).to(dtype)], dim=1)


def check_length(position_embeddings: torch.Tensor, tokens: int) -> None:
    """Raise ValueError unless position embeddings are (tables, tokens, hidden_size)."""
    if position_embeddings.ndim != 3 or position_embeddings.shape[1] != tokens:
        shape = tuple(position_embeddings.shape)
        raise ValueError(f"position embeddings have shape {shape}, not {tokens} tokens (with ZeRO-3, use hf_vit.load)")


@cached_on_device
def _linear_weights(old_grid: Grid, new_grid: Grid, method: str) -> list[torch.Tensor]:
    """Compute the float64 matrices of linear interpolation with aligned corners, for rows and for columns.

    The coordinates are computed as in scipy. For some sizes, such as 28 to 14, rounding moves the last coordinate
    beyond the last point, and scipy returns zero there. The method "jax_exact" does the same.

    Returns:
        (new_rows, old_rows) and (new_columns, old_columns). Every row of a matrix sums to 1, or to 0 in that case.
    """
    matrices = []
    for old, new in zip(old_grid, new_grid, strict=True):
        coordinates = torch.arange(new, dtype=torch.float64) * ((old - 1) / torch.sym_max(new - 1, 1))
        distances = coordinates[:, None] - torch.arange(old, dtype=torch.float64)
        weights = (1 - distances.abs()).clamp(min=0)
        if method == "jax_exact":
            weights = weights * (coordinates <= old - 1)[:, None]
        matrices.append(weights)
    return matrices
