"""Modules of the encoder: attention, MLP, stochastic depth, the pre-norm block, pooling."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_hf_vit import HfViTConfig
from .position_embeddings import Grid, RelativePositions
from .pretrained import lecun_normal_

_TAKE_A_BIAS = ("eager", "sdpa")  # attention implementations that take a bias of the logits


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention and return its probabilities too; the softmax is in float32 at least.

    Args:
        query, key, value: (batch, heads, tokens, head_dim)
        attention_mask: broadcastable to (batch, heads, tokens, tokens): True for allowed pairs, or numbers to add to
            the logits.

    Returns:
        (batch, tokens, heads, head_dim) and (batch, heads, tokens, tokens)
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    wide = torch.promote_types(scores.dtype, torch.float32)
    probabilities = F.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    probabilities = F.dropout(probabilities, p=dropout, training=module.training)
    return torch.matmul(probabilities, value).transpose(1, 2), probabilities


class HfViTAttention(nn.Module):
    """Multi-head self-attention over all tokens."""

    def __init__(self, config: HfViTConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        num_queries: int | None = None,
        grid: Grid | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(batch, tokens, hidden_size) -> (batch, queries, hidden_size), and the attentions or None

        The queries are the first `num_queries` tokens, or all. With `output_attentions=True` the attentions are
        (batch, heads, queries, tokens). Subclasses use `grid`, (rows, columns) of patches.
        """
        query, key, value = (
            projection(tokens).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for projection, tokens in (
                (self.q_proj, hidden_states[:, :num_queries]),
                (self.k_proj, hidden_states),
                (self.v_proj, hidden_states),
            )
        )  # (batch, heads, queries or tokens, head_dim)
        bias = self.with_bias(attention_mask, query, grid)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        name = "eager" if kwargs.get("output_attentions") else self.config._attn_implementation or "eager"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        attended, attentions = attend(self, query, key, value, bias, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.o_proj(attended.flatten(2)), attentions

    def with_bias(
        self, attention_mask: torch.Tensor | None, query: torch.Tensor, grid: Grid | None
    ) -> torch.Tensor | None:
        """Return the bias of the logits: here the mask alone."""
        return attention_mask


class HfViTRelativeAttention(HfViTAttention):
    """Attention with 1-D relative positions (section D.4 of arXiv 2010.11929).

    Relative position embeddings are the keys of a second attention; its logits are added before the softmax:

        logits[q, k] = (query[q] . key[k] + query[q] . embedding[p_q - p_k]) / sqrt(head_dim)

    where p is the place of a patch in raster order. The paper does not say what layers and heads share. Here each layer
    has its own embeddings and its heads share them, as in arXiv 1803.02155. For the class token see
    `RelativePositions`.
    """

    def __init__(self, config: HfViTConfig):
        super().__init__(config)
        self.positions = RelativePositions(config)

    def with_bias(
        self, attention_mask: torch.Tensor | None, query: torch.Tensor, grid: Grid | None
    ) -> torch.Tensor | None:
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


def build_attention(config: HfViTConfig, layer_index: int) -> HfViTAttention:
    """Build the attention of a layer; an axial encoder alternates between rows and columns."""
    if config.attention_axes == "axial":
        return HfViTAxialAttention(config, along_columns=layer_index % 2 == 1)
    if config.position_embedding_type == "relative":
        return HfViTRelativeAttention(config)
    return HfViTAttention(config)


class HfViTMLPLinear(nn.Linear):
    """Linear layer of an MLP."""

    def initialize(self) -> None:
        """Draw the weights as the original does (Xavier, biases of 1e-6)."""
        init.xavier_uniform_(self.weight)
        init.normal_(self.bias, std=1e-6)


class HfViTPreLogits(nn.Linear):
    """Linear layer before the head."""

    def initialize(self) -> None:
        """Draw the weights with flax's default."""
        lecun_normal_(self.weight)


class HfViTMLP(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: HfViTConfig):
        super().__init__()
        self.fc1 = HfViTMLPLinear(config.hidden_size, config.intermediate_size)
        self.hidden_act = config.hidden_act
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = HfViTMLPLinear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> the same"""
        hidden_states = self.dropout(self.activation(self.fc1(hidden_states)))
        return self.dropout(self.fc2(hidden_states))


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): drop a residual branch for whole samples."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> the same, scaled by 1 / (1 - rate) where it is kept"""
        if not self.training or self.rate == 0:
            return branch
        keep = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.rate
        return branch * (keep / (1 - self.rate)).to(branch.dtype)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


class HfViTLayer(GradientCheckpointingLayer):
    """Pre-norm encoder block, with dropout in the places of vit_jax/models_vit.py's Encoder1DBlock."""

    def __init__(self, config: HfViTConfig, layer_index: int):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = build_attention(config, layer_index)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = HfViTMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = DropPath(config.drop_path_rate * layer_index / max(config.num_hidden_layers - 1, 1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        num_queries: int | None = None,
        positions: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> the same, for all tokens or the first `num_queries`

        Args:
            positions: (tokens, hidden_size), added to the layer's input; None for nothing.
        """
        hidden_states = hidden_states if positions is None else hidden_states + positions
        attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, num_queries, **kwargs)
        hidden_states = hidden_states[:, :num_queries] + self.drop_path(self.dropout(attended))
        return hidden_states + self.drop_path(self.mlp(self.layernorm_after(hidden_states)))


class HfViTMapPooling(nn.Module):
    """Multi-head attention pooling (big_vision's MAPHead): a learned probe attends to all tokens, then an MLP."""

    def __init__(self, config: HfViTConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.probe = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = HfViTMLP(config)

    def initialize(self) -> None:
        """Draw the probe."""
        init.xavier_uniform_(self.probe)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, hidden_size); `attention_mask` (batch, 1, 1, tokens) or None"""
        query = self._split_heads(self.q_proj(self.probe)).expand(hidden_states.shape[0], -1, -1, -1)
        key, value = self._split_heads(self.k_proj(hidden_states)), self._split_heads(self.v_proj(hidden_states))
        pooled = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        pooled = self.o_proj(pooled.transpose(1, 2).flatten(2))  # (batch, 1, hidden_size)
        return (pooled + self.mlp(self.layernorm(pooled)))[:, 0]

    def _split_heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


class HfViTPooler(nn.Module):
    """Pooling of the tokens for the head, then the optional tanh pre-logits layer."""

    def __init__(self, config: HfViTConfig):
        super().__init__()
        self.pooling = config.pooling
        skips_prefix = config.pool_patches_only and config.pooling in ("mean", "map")
        self.first_token = config.num_prefix_tokens if skips_prefix else 0
        self.map = HfViTMapPooling(config) if config.pooling == "map" else None
        width = config.representation_size
        self.dense = None if width is None else HfViTPreLogits(config.hidden_size, width)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        norm: nn.Module | None = None,
    ) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, features), or (batch, tokens, features) with pooling "none"

        Args:
            attention_mask: (batch, tokens), True for real tokens; None if there is no padding.
            norm: the final LayerNorm, if it comes after the pooling.
        """
        hidden_states = hidden_states[:, self.first_token :]
        attention_mask = None if attention_mask is None else attention_mask[:, self.first_token :]
        pooled = self.pool(hidden_states, attention_mask)
        pooled = pooled if norm is None else norm(pooled)
        return pooled if self.dense is None else torch.tanh(self.dense(pooled))

    def pool(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, hidden_size); unchanged with pooling "none"."""
        if self.pooling == "cls":
            return hidden_states[:, 0]
        if self.pooling == "none":
            return hidden_states
        if self.map is not None:
            return self.map(hidden_states, None if attention_mask is None else attention_mask[:, None, None, :].bool())
        if attention_mask is None:
            return hidden_states.mean(dim=1)
        real = hidden_states * attention_mask.to(hidden_states.dtype).unsqueeze(-1)
        wide = torch.promote_types(real.dtype, torch.float32)  # a sum of many tokens can exceed float16
        return (real.sum(dim=1, dtype=wide) / attention_mask.sum(dim=1, keepdim=True, dtype=wide)).to(real.dtype)
