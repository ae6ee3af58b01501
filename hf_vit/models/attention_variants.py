"""Attention variants of the paper's appendix: relative positions and axial attention."""

import torch

from .configuration_hf_vit import HfViTConfig
from .modeling_hf_vit import HfViTAttention, apply_mask
from .position_embeddings import Grid, RelativePositions

_SUPPORT_BIAS = ("eager", "sdpa")  # attention implementations that accept a bias of the logits


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

    def attention_bias(
        self, query: torch.Tensor, attention_mask: torch.Tensor | None, grid: Grid | None
    ) -> torch.Tensor | None:
        """Return the logits of the second attention plus the mask, (batch, heads, queries, tokens)."""
        implementation = self.config._attn_implementation
        if implementation not in _SUPPORT_BIAS:
            raise ValueError(f"relative positions need attn_implementation 'sdpa' or 'eager', not {implementation!r}")
        assert grid is not None
        bias = _relative_logits(query * self.scaling, self.positions(grid)[: query.shape[2]])
        return apply_mask(bias, attention_mask)


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
        grid: Grid | None = None,
        **kwargs,
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
        assert grid is not None
        lines = hidden_states.unflatten(1, grid)  # (batch, rows, columns, hidden_size)
        lines = lines.transpose(1, 2) if self.along_columns else lines
        attended, attentions = super().forward(lines.flatten(0, 1), **kwargs)
        attended = attended.unflatten(0, lines.shape[:2])
        attended = attended.transpose(1, 2) if self.along_columns else attended
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
