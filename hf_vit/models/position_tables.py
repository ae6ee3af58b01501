"""The position embeddings of Table 8 of arXiv 2010.11929 (section D.4) besides the plain table at the input.

Where they are learned for every layer there is a table for each; where one is shared, or at the input, there is one.
All follow the resolution, by the rule that the configuration names (`position_interpolation`).
"""

import torch
from torch import nn
from torch.nn import functional as F

from .position_embeddings import Grid, resize_position_embeddings, resize_relative_embeddings


class PositionTables(nn.Module):
    """Learned tables on the grid of `config.image_size`; `forward` gives them on any grid."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, grid: Grid) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def resample(self, grid: Grid) -> None:
        """Resample to another grid for good; `config.image_size` is to follow."""
        raise NotImplementedError


class LearnedPositions(PositionTables):
    """A vector for each token, the patches in raster order ("1-D" in Table 8)."""

    def __init__(self, config, count: int):
        super().__init__(config)
        rows, columns = config.grid_size
        self.table = nn.Parameter(torch.zeros(count, config.num_prefix_tokens + rows * columns, config.hidden_size))

    def forward(self, grid: Grid) -> torch.Tensor:
        """(rows, columns) -> (tables, tokens, hidden_size)"""
        config = self.config
        return resize_position_embeddings(
            self.table, config.grid_size, grid, config.num_prefix_tokens, config.position_interpolation
        )

    @torch.no_grad()
    def resample(self, grid: Grid) -> None:
        self.table = nn.Parameter(self(grid))


class LearnedPositions2D(PositionTables):
    """A vector of hidden_size / 2 for each column (X) and for each row (Y), concatenated ("2-D" in Table 8).

    The paper does not say what the class token has; here it has a vector of its own, as in the plain table.
    """

    def __init__(self, config, count: int):
        super().__init__(config)
        (rows, columns), half = config.grid_size, config.hidden_size // 2
        self.x = nn.Parameter(torch.zeros(count, columns, half))
        self.y = nn.Parameter(torch.zeros(count, rows, half))
        self.prefix = None
        if config.num_prefix_tokens:
            self.prefix = nn.Parameter(torch.zeros(count, config.num_prefix_tokens, config.hidden_size))

    def forward(self, grid: Grid) -> torch.Tensor:
        """(rows, columns) -> (tables, tokens, hidden_size)"""
        y, x = self.axes(grid)
        rows, columns = grid
        patches = torch.cat([x[:, None].expand(-1, rows, -1, -1), y[:, :, None].expand(-1, -1, columns, -1)], dim=3)
        patches = patches.flatten(1, 2)
        return patches if self.prefix is None else torch.cat([self.prefix, patches], dim=1)

    def axes(self, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
        """(tables, rows, hidden_size / 2) and (tables, columns, hidden_size / 2)"""
        old, method = self.config.grid_size, self.config.position_interpolation
        y = resize_position_embeddings(self.y, (old[0], 1), (grid[0], 1), 0, method)
        return y, resize_position_embeddings(self.x, (1, old[1]), (1, grid[1]), 0, method)

    @torch.no_grad()
    def resample(self, grid: Grid) -> None:
        self.y, self.x = map(nn.Parameter, self.axes(grid))


class RelativePositions(PositionTables):
    """A vector for each relative distance of two patches, for `HfViTRelativeAttention`; all heads share it.

    The distance is that of the patches in raster order, p_query - p_key, as the paper's is. The class token has no
    place on the grid: three vectors of its own are for the pairs class token and patch, patch and class token, and
    class token and itself (query and key).
    """

    def __init__(self, config):
        super().__init__(config)
        rows, columns = config.grid_size
        self.num_special = 3 * config.num_prefix_tokens
        head_dim = config.hidden_size // config.num_attention_heads
        self.table = nn.Parameter(torch.zeros(1, self.num_special + 2 * rows * columns - 1, head_dim))

    def forward(self, grid: Grid) -> torch.Tensor:
        """(rows, columns) -> (queries, keys, head_dim)"""
        return self.on(grid)[0, self.index(grid)]

    def on(self, grid: Grid) -> torch.Tensor:
        """(rows, columns) -> (1, special pairs + 2 * rows * columns - 1, head_dim)"""
        config = self.config
        return resize_relative_embeddings(
            self.table, config.grid_size, grid, self.num_special, config.position_interpolation
        )

    def index(self, grid: Grid) -> torch.Tensor:
        """Which row of the table belongs to a pair of tokens: (queries, keys)"""
        place = torch.arange(grid[0] * grid[1], device=self.table.device)
        distance = place[:, None] - place + (self.num_special + grid[0] * grid[1] - 1)
        if not self.num_special:
            return distance
        seen_by_class_token = F.pad(torch.zeros_like(place), (1, 0), value=2)
        return torch.cat([seen_by_class_token[None], F.pad(distance, (1, 0), value=1)])

    @torch.no_grad()
    def resample(self, grid: Grid) -> None:
        self.table = nn.Parameter(self.on(grid))


def build_tables(config, count: int) -> PositionTables:
    """Those that are added to tokens."""
    return (LearnedPositions2D if config.position_embedding_type == "learned2d" else LearnedPositions)(config, count)


def build_layer_tables(config) -> PositionTables | None:
    """What `position_embedding_placement` asks for: a table for each layer, or one for all; None for "input"."""
    counts = {"every_layer": config.num_hidden_layers, "every_layer_shared": 1}
    count = counts.get(config.position_embedding_placement)
    return None if count is None else build_tables(config, count)


def positions_of_layers(model, grid: Grid | None) -> list[torch.Tensor | None]:
    """What each layer of a model adds to its input: (tokens, hidden_size), or None for nothing."""
    if model.layer_position_embeddings is None:
        return [None] * len(model.layers)
    tables = model.layer_position_embeddings(grid)
    return list(tables.expand(len(model.layers), -1, -1))
