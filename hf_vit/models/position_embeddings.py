"""Position embeddings: fixed and learned tables, and their resampling for other image sizes.

The learned tables are the variants in Table 8 of arXiv 2010.11929 (section D.4). `HfViTConfig.position_interpolation`
chooses the resampling method.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_hf_vit import HfViTConfig
from .pretrained import is_tracing
from .sizes import is_same_grid

Grid = tuple[int, int]  # (rows, columns) of patches


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
    row, column = row.reshape(-1, 1) * omega, column.reshape(-1, 1) * omega  # (rows * columns, hidden_size / 4)
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
    _check_length(position_embeddings, num_prefix_tokens + old_grid[0] * old_grid[1])
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


def _check_length(position_embeddings: torch.Tensor, tokens: int) -> None:
    if position_embeddings.ndim != 3 or position_embeddings.shape[1] != tokens:
        shape = tuple(position_embeddings.shape)
        raise ValueError(f"position embeddings have shape {shape}, not {tokens} tokens (with ZeRO-3, use hf_vit.load)")


def resize_relative_embeddings(
    embeddings: torch.Tensor, old_grid: Grid, new_grid: Grid, num_special: int, method: str = "jax"
) -> torch.Tensor:
    """Resample embeddings of 1-D relative distances (in raster order) from one grid of patches to another.

    A 2-D offset of r rows and c columns has the distance r * columns + c in raster order. The embeddings are arranged
    on the grid of all offsets (r, c) and resampled like position embeddings. Offsets with the same distance are then
    averaged, weighted by the number of patch pairs with that offset.

    Args:
        embeddings: (tables, num_special + 2 * old_rows * old_columns - 1, head_dim), in order of increasing distance;
            the first `num_special` do not change.
        old_grid, new_grid, method: see `resize_position_embeddings`.

    Returns:
        (tables, num_special + 2 * new_rows * new_columns - 1, head_dim), in the dtype of the input.
    """
    if is_same_grid(old_grid, new_grid):
        return embeddings
    num_distances = 2 * old_grid[0] * old_grid[1] - 1
    _check_length(embeddings, num_special + num_distances)
    special, distances = embeddings.split([num_special, num_distances], dim=1)
    new_reach = [size - 1 for size in new_grid]
    # 0 for an axis that shrinks to 1
    old_reach = [old - 1 if new > 1 else 0 for old, new in zip(old_grid, new_grid, strict=True)]
    old_indices, _ = _indices_of_distances(old_grid, old_reach, embeddings.device)
    new_indices, counts = _indices_of_distances(new_grid, new_reach, embeddings.device)
    old_size, new_size = ((2 * rows + 1, 2 * columns + 1) for rows, columns in (old_reach, new_reach))
    distances = distances.to(torch.promote_types(embeddings.dtype, torch.float32))
    offsets = resize_position_embeddings(distances[:, old_indices], old_size, new_size, 0, method)
    length, counts = 2 * new_grid[0] * new_grid[1] - 1, counts.to(offsets.dtype)
    totals = counts.new_zeros(length).index_add(0, new_indices, counts)
    sums = offsets.new_zeros(len(offsets), length, offsets.shape[2])
    sums = sums.index_add(1, new_indices, offsets * counts[:, None])
    return torch.cat([special, (sums / totals[:, None]).to(embeddings.dtype)], dim=1)


def _indices_of_distances(grid: Grid, reach: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """List the 2-D offsets of up to `reach` (rows, columns) in both directions.

    Returns:
        For each offset, the index of its distance in the table of embeddings, and the number of patch pairs with this
        offset; both of length (2 * reach[0] + 1) * (2 * reach[1] + 1).
    """
    rows, columns = (torch.arange(-limit, limit + 1, device=device) for limit in reach)
    indices = rows[:, None] * grid[1] + columns + grid[0] * grid[1] - 1
    counts = (grid[0] - rows.abs())[:, None] * (grid[1] - columns.abs())
    return indices.flatten(), counts.flatten()


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
        matrices.append(weights * (coordinates <= old - 1)[:, None] if method == "jax_exact" else weights)
    return matrices


class PositionTables(nn.Module):
    """Base class of learned tables for `config.stored_grid`; `forward` resamples them for other grids."""

    resampled: Callable[[Grid], dict[str, torch.Tensor]]  # (rows, columns) -> the parameters for this grid, by name

    def __init__(self, config: HfViTConfig):
        super().__init__()
        self.config = config

    def initialize(self) -> None:
        """Initialize the tables from a normal distribution."""
        for table in self.parameters():
            init.normal_(table, std=self.config.initializer_range)

    @torch.no_grad()
    def resample(self, grid: Grid) -> None:
        """Resample the tables permanently for a grid (rows, columns); the caller updates the configuration."""
        for name, table in self.resampled(grid).items():
            setattr(self, name, nn.Parameter(table, getattr(self, name).requires_grad))


class LearnedPositions(PositionTables):
    """One vector per token, with the patches in raster order ("1-D" in Table 8)."""

    def __init__(self, config: HfViTConfig, count: int):
        super().__init__(config)
        rows, columns = config.stored_grid
        self.table = nn.Parameter(torch.zeros(count, config.num_prefix_positions + rows * columns, config.hidden_size))

    def forward(self, grid: Grid) -> torch.Tensor:
        """(rows, columns) -> (tables, num_prefix_positions + rows * columns, hidden_size)"""
        return self.resampled(grid)["table"]

    def resampled(self, grid: Grid) -> dict[str, torch.Tensor]:
        prefix, old, method = (
            self.config.num_prefix_positions,
            self.config.stored_grid,
            self.config.position_interpolation,
        )
        return {"table": resize_position_embeddings(self.table, old, grid, prefix, method)}


class LearnedPositions2D(PositionTables):
    """One vector of hidden_size / 2 per column (`x`) and per row (`y`), concatenated ("2-D" in Table 8).

    The paper does not mention the class token. Here it has its own vector, as in `LearnedPositions`.
    """

    def __init__(self, config: HfViTConfig, count: int):
        super().__init__(config)
        (rows, columns), half = config.stored_grid, config.hidden_size // 2
        self.x = nn.Parameter(torch.zeros(count, columns, half))
        self.y = nn.Parameter(torch.zeros(count, rows, half))
        self.prefix = None
        if config.num_prefix_positions:
            self.prefix = nn.Parameter(torch.zeros(count, config.num_prefix_positions, config.hidden_size))

    def forward(self, grid: Grid) -> torch.Tensor:
        """(rows, columns) -> (tables, num_prefix_positions + rows * columns, hidden_size)"""
        y, x = self.resampled(grid).values()  # (tables, rows or columns, hidden_size / 2)
        rows, columns = grid
        patches = torch.cat([x[:, None].expand(-1, rows, -1, -1), y[:, :, None].expand(-1, -1, columns, -1)], dim=3)
        patches = patches.flatten(1, 2)
        return patches if self.prefix is None else torch.cat([self.prefix, patches], dim=1)

    def resampled(self, grid: Grid) -> dict[str, torch.Tensor]:
        old, method = self.config.stored_grid, self.config.position_interpolation
        return {
            "y": resize_position_embeddings(self.y, (old[0], 1), (grid[0], 1), 0, method),
            "x": resize_position_embeddings(self.x, (1, old[1]), (1, grid[1]), 0, method),
        }


class RelativePositions(PositionTables):
    """One vector per relative distance of two patches, shared by all heads; for `HfViTRelativeAttention`.

    The distance is p_query - p_key in raster order, as in the paper. The class token has no position on the grid, so
    the pairs (query, key) that include it have three special vectors: for the class token and a patch, for a patch and
    the class token, and for the class token and itself.
    """

    def __init__(self, config: HfViTConfig):
        super().__init__(config)
        rows, columns = config.stored_grid
        self.num_special = 3 * config.num_prefix_tokens
        head_dim = config.hidden_size // config.num_attention_heads
        self.table = nn.Parameter(torch.zeros(1, self.num_special + 2 * rows * columns - 1, head_dim))

    def forward(self, grid: Grid) -> torch.Tensor:
        """(rows, columns) -> (queries, keys, head_dim)"""
        return self.resampled(grid)["table"][0, self.index(grid)]

    def resampled(self, grid: Grid) -> dict[str, torch.Tensor]:
        old, method = self.config.stored_grid, self.config.position_interpolation
        return {"table": resize_relative_embeddings(self.table, old, grid, self.num_special, method)}

    def index(self, grid: Grid) -> torch.Tensor:
        """Return the index into the table for each pair of tokens, (queries, keys)."""
        index = torch.arange(grid[0] * grid[1], device=self.table.device)
        distance = index[:, None] - index + (self.num_special + grid[0] * grid[1] - 1)
        if not self.num_special:
            return distance
        cls_queries = F.pad(torch.zeros_like(index), (1, 0), value=2)
        return torch.cat([cls_queries[None], F.pad(distance, (1, 0), value=1)])


def build_tables(config: HfViTConfig, count: int) -> PositionTables:
    """Build the learned tables that are added to tokens; `count` is their number."""
    return (LearnedPositions2D if config.position_embedding_type == "learned2d" else LearnedPositions)(config, count)


def build_layer_tables(config: HfViTConfig) -> PositionTables | None:
    """Build one table per layer, or one table for all layers; return None with the placement "input"."""
    counts = {"every_layer": config.num_hidden_layers, "every_layer_shared": 1}
    count = counts.get(config.position_embedding_placement)
    return None if count is None else build_tables(config, count)
