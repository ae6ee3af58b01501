"""Position embeddings: fixed tables, and learned tables that follow the resolution."""

import torch
from torch.nn.functional import interpolate

Grid = tuple[int, int]  # (rows, columns) of patches


def sincos2d(grid: Grid, hidden_size: int, temperature: float = 10_000.0) -> torch.Tensor:
    """Fixed 2-D sine-cosine position embeddings of MoCo v3, as `posemb_sincos_2d` of big_vision lays them out.

    Computed in float64, on the CPU.

    Returns:
        (1, rows * columns, hidden_size): sines and cosines of the column, then of the row.
    """
    omega = temperature ** -torch.linspace(0, 1, hidden_size // 4, dtype=torch.float64)
    row, column = torch.meshgrid(*(torch.arange(size, dtype=torch.float64) for size in grid), indexing="ij")
    row, column = row.reshape(-1, 1) * omega, column.reshape(-1, 1) * omega  # (rows * columns, hidden_size / 4)
    return torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], dim=1).unsqueeze(0)


def resize_position_embeddings(
    position_embeddings: torch.Tensor, old_grid: Grid, new_grid: Grid, num_prefix_tokens: int, method: str = "jax"
) -> torch.Tensor:
    """Resample learned position embeddings from one grid of patches to another, in float32 at least.

    Args:
        position_embeddings: (1, num_prefix_tokens + old_rows * old_columns, hidden_size); the rows of the prefix
            tokens are kept as they are.
        old_grid, new_grid: (rows, columns) of patches.
        method: "jax": bilinear with aligned corners, which is what `scipy.ndimage.zoom(order=1)` computes in
            `interpolate_posembed`, google-research/vision_transformer, vit_jax/checkpoint.py. "jax_exact": the same
            with that function's rounding fault, see `_rounds_out`. "bilinear", "bicubic": half-pixel centres,
            antialiased, as timm does it.

    Returns:
        (1, num_prefix_tokens + new_rows * new_columns, hidden_size), in the dtype of the input.
    """
    if tuple(old_grid) == tuple(new_grid):
        return position_embeddings
    dtype = position_embeddings.dtype
    prefix, patches = position_embeddings.split([num_prefix_tokens, old_grid[0] * old_grid[1]], dim=1)
    patches = patches.unflatten(1, old_grid).permute(0, 3, 1, 2)  # (1, hidden_size, old_rows, old_columns)
    patches = patches.to(torch.promote_types(dtype, torch.float32))
    if method.startswith("jax"):
        patches = interpolate(patches, size=new_grid, mode="bilinear", align_corners=True)
        if method == "jax_exact":
            patches = _zero_what_rounds_out(patches, old_grid)
    else:
        patches = interpolate(patches, size=new_grid, mode=method, align_corners=False, antialias=True)
    patches = patches.to(dtype).flatten(2).transpose(1, 2)  # (1, new_rows * new_columns, hidden_size)
    return torch.cat([prefix, patches], dim=1)


def _rounds_out(old: int, new: int) -> bool:
    """Whether the last of `new` samples falls outside of `old` ones in scipy's arithmetic, which then gives zero."""
    return new > 1 and (old - 1) / (new - 1) * (new - 1) > old - 1


def _zero_what_rounds_out(patches: torch.Tensor, old_grid: Grid) -> torch.Tensor:
    patches = patches.clone()
    if _rounds_out(old_grid[0], patches.shape[2]):
        patches[:, :, -1, :] = 0
    if _rounds_out(old_grid[1], patches.shape[3]):
        patches[:, :, :, -1] = 0
    return patches
