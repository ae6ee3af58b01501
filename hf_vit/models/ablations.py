"""The ablations of the paper's appendix: other position embeddings (Table 8, section D.4) and axial attention (D.6).

Table 8 of arXiv 2010.11929 compares 1-D, 2-D and relative positions, each added to the input, to the input of every
layer, or to the input of every layer from a shared table. The layers of these models get `grid`, the rows and columns
of patches, and `tables`, the position embeddings of the layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_hf_vit import HfViTConfig
from .modeling_hf_vit import HfViTAttention, apply_mask, check_length, resize_position_embeddings
from .modeling_hf_vit import HfViTLayer as PlainLayer
from .sizes import Grid, is_same_grid

_SUPPORT_BIAS = ("eager", "sdpa")  # attention implementations that accept a bias of the logits


def build_layer(config: HfViTConfig, layer_index: int) -> PlainLayer:
    """Build an encoder block with the attention and the position embeddings that the configuration names."""
    attention = None
    if config.attention_axes == "axial":
        attention = HfViTAxialAttention(config, along_columns=layer_index % 2 == 1)
    elif config.position_embedding_type == "relative":
        attention = HfViTRelativeAttention(config)
    layer_class = PlainLayer if config.position_embedding_placement == "input" else HfViTLayer
    return layer_class(config, layer_index, attention)


def build_tables(config: HfViTConfig, count: int) -> "PositionTables":
    """Build the learned tables that are added to tokens; `count` is their number."""
    table_class = LearnedPositions2D if config.position_embedding_type == "learned2d" else LearnedPositions
    return table_class(config, count)


def build_layer_tables(config: HfViTConfig) -> "PositionTables | None":
    """Build one table per layer, or one table for all layers; return None with the placement "input"."""
    counts = {"every_layer": config.num_hidden_layers, "every_layer_shared": 1}
    count = counts.get(config.position_embedding_placement)
    return None if count is None else build_tables(config, count)


class HfViTLayer(PlainLayer):
    """Encoder block that adds position embeddings to its input."""

    def __init__(self, config: HfViTConfig, layer_index: int, attention: HfViTAttention | None = None):
        super().__init__(config, layer_index, attention)
        self.layer_index = layer_index

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        num_queries: int | None = None,
        *,
        tables: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the layer on `hidden_states + tables[layer_index]`; `tables` is (layers, tokens, hidden_size)."""
        return super().forward(hidden_states + tables[self.layer_index], attention_mask, num_queries, **kwargs)


class HfViTRelativeAttention(HfViTAttention):
    """Attention with 1-D relative positions (section D.4 of arXiv 2010.11929).

    The relative position embeddings are the keys of a second attention. Its logits are added before the softmax:

        logits[q, k] = (query[q] . key[k] + query[q] . embedding[p_q - p_k]) / sqrt(head_dim)

    where p is the index of a patch in raster order. The paper does not specify whether layers and heads share the
    embeddings. Here, each layer has its own embeddings and its heads share them, as in arXiv 1803.02155. For the class
    token, see `RelativePositions`.
    """

    def __init__(self, config: HfViTConfig):
        super().__init__(config)
        self.positions = RelativePositions(config)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        grid: Grid,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention; the logits of the second attention, plus the mask, are the bias of the first."""
        implementation = self.config._attn_implementation
        if implementation not in _SUPPORT_BIAS:
            raise ValueError(f"relative positions need attn_implementation 'sdpa' or 'eager', not {implementation!r}")
        embeddings = self.positions(grid)[: query.shape[2]]
        bias = apply_mask(_relative_logits(query * self.scaling, embeddings), attention_mask)
        return super().attend(query, key, value, bias, **kwargs)


def _relative_logits(query: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """(batch, heads, queries, head_dim) and (queries, keys, head_dim) -> (batch, heads, queries, keys)

    This is one matrix product for each query, with batch and heads as rows, so the embeddings are not repeated for each
    image.
    """
    rows = query.permute(2, 0, 1, 3).flatten(1, 2)
    logits = torch.matmul(rows, embeddings.transpose(1, 2))  # (queries, batch * heads, keys)
    return logits.unflatten(1, query.shape[:2]).permute(1, 2, 0, 3)


class HfViTAxialAttention(HfViTAttention):
    """Attention along the rows or the columns of the patch grid (section D.6 of arXiv 2010.11929).

    A token attends only to its own row (`columns` keys), or with `along_columns` to its own column (`rows` keys).
    """

    def __init__(self, config: HfViTConfig, along_columns: bool):
        super().__init__(config)
        self.along_columns = along_columns

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        num_queries: int | None = None,
        *,
        grid: Grid,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply self-attention along rows or columns.

        Args:
            hidden_states: (batch, rows * columns, hidden_size)
            attention_mask: not supported.
            num_queries: ignored; all tokens are computed.
            grid: (rows, columns)

        Returns:
            (batch, rows * columns, hidden_size); and the probabilities (batch, heads, tokens, tokens), which are zero
            between different rows (or columns), or None.
        """
        if attention_mask is not None:
            raise ValueError("axial attention supports no attention_mask; omit it")
        lines = hidden_states.unflatten(1, grid)  # (batch, rows, columns, hidden_size)
        if self.along_columns:
            lines = lines.transpose(1, 2)
        attended, attentions = super().forward(lines.flatten(0, 1), **kwargs)
        attended = attended.unflatten(0, lines.shape[:2])
        if self.along_columns:
            attended = attended.transpose(1, 2)
        if attentions is not None:
            attentions = self.expand_attentions(attentions, lines.shape[1])
        return attended.flatten(1, 2), attentions

    def expand_attentions(self, attentions: torch.Tensor, num_lines: int) -> torch.Tensor:
        """(batch * lines, heads, line length, line length) -> (batch, heads, tokens, tokens)

        A line is a row, or a column with `along_columns`.
        """
        attentions = attentions.unflatten(0, (-1, num_lines)).movedim(1, -1)
        attentions = torch.diag_embed(attentions)  # (batch, heads, query, key, line of query, line of key)
        order = (0, 1, 2, 4, 3, 5) if self.along_columns else (0, 1, 4, 2, 5, 3)
        return attentions.permute(order).flatten(4, 5).flatten(2, 3)


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
        config = self.config
        resized = resize_position_embeddings(
            self.table, config.stored_grid, grid, config.num_prefix_positions, config.position_interpolation
        )
        return {"table": resized}


class LearnedPositions2D(PositionTables):
    """One vector of hidden_size / 2 per column (`x`) and per row (`y`), concatenated ("2-D" in Table 8).

    The paper does not mention the class token. Here it has its own vector, as in `LearnedPositions`.
    """

    def __init__(self, config: HfViTConfig, count: int):
        super().__init__(config)
        rows, columns = config.stored_grid
        half = config.hidden_size // 2
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
        old = self.config.stored_grid
        method = self.config.position_interpolation
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
        old = self.config.stored_grid
        method = self.config.position_interpolation
        return {"table": resize_relative_embeddings(self.table, old, grid, self.num_special, method)}

    def index(self, grid: Grid) -> torch.Tensor:
        """Return the index into the table for each pair of tokens, (queries, keys)."""
        index = torch.arange(grid[0] * grid[1], device=self.table.device)
        distance = index[:, None] - index + (self.num_special + grid[0] * grid[1] - 1)
        if not self.num_special:
            return distance
        cls_queries = F.pad(torch.zeros_like(index), (1, 0), value=2)
        return torch.cat([cls_queries[None], F.pad(distance, (1, 0), value=1)])


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
    check_length(embeddings, num_special + num_distances)
    special, distances = embeddings.split([num_special, num_distances], dim=1)
    new_reach = [new - 1 for new in new_grid]
    old_reach = [(old - 1) * (new > 1) for old, new in zip(old_grid, new_grid, strict=True)]  # 0: shrinks to 1
    old_indices, _ = _indices_of_distances(old_grid, old_reach, embeddings.device)
    new_indices, counts = _indices_of_distances(new_grid, new_reach, embeddings.device)
    old_size, new_size = ((2 * rows + 1, 2 * columns + 1) for rows, columns in (old_reach, new_reach))
    distances = distances.to(torch.promote_types(embeddings.dtype, torch.float32))
    offsets = resize_position_embeddings(distances[:, old_indices], old_size, new_size, 0, method)
    length = 2 * new_grid[0] * new_grid[1] - 1
    counts = counts.to(offsets.dtype)
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
