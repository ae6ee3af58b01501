"""What the encoder is made of besides attention: MLP, stochastic depth, the pre-norm block, pooling."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import build_attention
from .configuration_hf_vit import HfViTConfig
from .pretrained import lecun_normal_


class HfViTMLPLinear(nn.Linear):
    def initialize(self) -> None:
        init.xavier_uniform_(self.weight)
        init.normal_(self.bias, std=1e-6)


class HfViTPreLogits(nn.Linear):
    def initialize(self) -> None:
        lecun_normal_(self.weight)


class HfViTMLP(nn.Module):
    def __init__(self, config: HfViTConfig):
        super().__init__()
        self.fc1 = HfViTMLPLinear(config.hidden_size, config.intermediate_size)
        self.hidden_act = config.hidden_act
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = HfViTMLPLinear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.dropout(self.activation(self.fc1(hidden_states)))
        return self.dropout(self.fc2(hidden_states))


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): a residual branch is dropped for a whole sample."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return branch
        keep = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.rate
        return branch * (keep / (1 - self.rate)).to(branch.dtype)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


class HfViTLayer(GradientCheckpointingLayer):
    """Pre-norm encoder block. Dropout stands where Encoder1DBlock of vit_jax/models_vit.py has it."""

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
        """(batch, tokens, hidden_size) -> the same, of all tokens or of the first `num_queries`

        Args:
            positions: (tokens, hidden_size) that this layer adds to its input; None for a model without.
        """
        hidden_states = hidden_states if positions is None else hidden_states + positions
        attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, num_queries, **kwargs)
        hidden_states = hidden_states[:, :num_queries] + self.drop_path(self.dropout(attended))
        return hidden_states + self.drop_path(self.mlp(self.layernorm_after(hidden_states)))


class HfViTMapPooling(nn.Module):
    """Multihead attention pooling (MAPHead of big_vision): a learned probe looks at all tokens, then an MLP."""

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
    """From tokens to what the head sees: pooling, then the optional tanh pre-logits layer."""

    def __init__(self, config: HfViTConfig):
        super().__init__()
        self.pooling = config.pooling
        leaves_out_prefix = config.pool_patches_only and config.pooling in ("mean", "map")
        self.first_token = config.num_prefix_tokens if leaves_out_prefix else 0
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
            attention_mask: (batch, tokens), True for the tokens that count; None when all do.
            norm: the final LayerNorm, if it comes after the pooling.
        """
        hidden_states = hidden_states[:, self.first_token :]
        attention_mask = None if attention_mask is None else attention_mask[:, self.first_token :]
        pooled = self.pool(hidden_states, attention_mask)
        pooled = pooled if norm is None else norm(pooled)
        return pooled if self.dense is None else torch.tanh(self.dense(pooled))

    def pool(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, hidden_size), or as they are with pooling "none"."""
        if self.pooling == "cls":
            return hidden_states[:, 0]
        if self.pooling == "none":
            return hidden_states
        if self.map is not None:
            return self.map(hidden_states, None if attention_mask is None else attention_mask[:, None, None, :].bool())
        if attention_mask is None:
            return hidden_states.mean(dim=1)
        weights = attention_mask.to(hidden_states.dtype).unsqueeze(-1)
        return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1)
