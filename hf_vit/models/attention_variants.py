"""Attention variants of the paper's appendix: relative positions, and axial attention."""

import torch

from .configuration_hf_vit import HfViTConfig
from .modeling_hf_vit import HfViTAttention
from .position_embeddings import Grid, RelativePositions

_TAKE_A_BIAS = ("eager", "sdpa")  # attention implementations that take a bias of the logits


class HfViTRelativeAttention(HfViTAttention):
    """Attention with 1-D relative positions (section D.4 of arXiv 2010.11929).

    Relative position embeddings are the keys of a second attention; its logits are added before the softmax:

        logits[q, k] = (query[q] . key[k] + query[q] . embedding[p_q - p_k]) / sqrt(head_dim)

    where p is the index of a patch in raster order. The paper does not say which embeddings layers and heads share.
    Here each layer has its own embeddings and its heads share them, as in arXiv 1803.02155. For the class token see
    `RelativePositions`.
    """

    def __init__(self, config: HfViTConfig):
        super().__init__(config)
        self.positions = RelativePositions(config)

    def bias(self, query: torch.Tensor, attention_mask: torch.Tensor | None, grid: Grid | None) -> torch.Tensor | None:
        """Return the logits of the second attention, (batch, heads, queries, tokens), plus the mask."""
        implementation = self.config._attn_implementation
        if implementation not in _TAKE_A_BIAS:
            raise ValueError(
                f"relative positions cannot use {implementation} attention, which takes no bias; set eager or sdpa"
            )
        assert grid is not None
        bias = _relative_logits(query * self.scaling, self.positions(grid)[: query.shape[2]])
        if attention_mask is None:
            return bias
        if attention_mask.dtype == torch.bool:
            return bias.masked_fill(~attention_mask, torch.finfo(bias.dtype).min)
        return bias + attention_mask


def _relative_logits(query: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """(batch, heads, queries, head_dim) with (queries, keys, head_dim) -> (batch, heads, queries, keys)

    One matrix product for each query, with batch and heads as rows; the embeddings are not copied for each image.
    """
    rows = query.permute(2, 0, 1, 3).flatten(1, 2)
    logits = torch.matmul(rows, embeddings.transpose(1, 2))  # (queries, batch * heads, keys)
    return logits.unflatten(1, query.shape[:2]).permute(1, 2, 0, 3)


class HfViTAxialAttention(HfViTAttention):
    """Attention along the rows or the columns of the grid of patches (section D.6 of arXiv 2010.11929).

    A token attends to its own row or column: columns + rows keys in two layers, instead of rows * columns in each.
    """

    def __init__(self, config: HfViTConfig, along_columns: bool):
        super().__init__(config)
        self.along_columns = along_columns

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        num_queries: int | None = None,
        grid: Grid | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(batch, rows * columns, hidden_size) -> the same, and the attentions (zero between lines) or None"""
        if attention_mask is not None:
            raise ValueError("axial attention cannot use attention_mask: it covers whole rows and columns; omit it")
        assert grid is not None
        lines = hidden_states.unflatten(1, grid)  # (batch, rows, columns, hidden_size)
        lines = lines.transpose(1, 2) if self.along_columns else lines
        attended, attentions = super().forward(lines.flatten(0, 1), **kwargs)
        attended = attended.unflatten(0, lines.shape[:2])
        attended = attended.transpose(1, 2) if self.along_columns else attended
        return attended.flatten(1, 2), None if attentions is None else self.among_all_tokens(attentions, lines.shape[1])

    def among_all_tokens(self, attentions: torch.Tensor, num_lines: int) -> torch.Tensor:
        """(batch * lines, heads, line length, line length) -> (batch, heads, tokens, tokens)"""
        attentions = attentions.unflatten(0, (-1, num_lines)).movedim(1, -1)
        attentions = torch.diag_embed(attentions)  # (batch, heads, query, key, line of query, line of key)
        order = (0, 1, 2, 4, 3, 5) if self.along_columns else (0, 1, 4, 2, 5, 3)
        return attentions.permute(order).flatten(4, 5).flatten(2, 3)
