"""Modules of the encoder: attention, MLP, stochastic depth, the pre-norm block, pooling."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingImports] - is there
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_hf_vit import HfViTConfig
from .inference import is_recorded, mkl_is_narrower
from .position_embeddings import Grid, RelativePositions
from .pretrained import lecun_normal_

_TAKE_A_BIAS = ("eager", "sdpa")  # attention implementations that take a bias of the logits
LOGITS_PER_THREAD = 2**19  # of a block of heads or queries: they fit into a core's cache
_PROGRAMS = 64  # oneDNN programs that are kept, one for each layout
# Attention in TorchScript. oneDNN reads the names of the operators, and takes the sizes from the first call.
_ATTENTION = """
graph(%query : Tensor, %key : Tensor, %value : Tensor, %scaling : Tensor):
  %products : Tensor = aten::bmm(%query, %key)
  %logits : Tensor = aten::mul(%products, %scaling)
  %tokens : int = prim::Constant[value=-1]()
  %dtype : NoneType = prim::Constant()
  %probabilities : Tensor = aten::softmax(%logits, %tokens, %dtype)
  %attended : Tensor = aten::bmm(%probabilities, %value)
  return (%attended)
"""


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


def blocked_attention_forward(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, scaling: float, **kwargs
) -> tuple[torch.Tensor, None]:
    """Compute attention by matrix products, one block of heads at a time, without mask and dropout.

    In bfloat16, on a CPU with bfloat16 products, this is 1.3 to 1.8 times as fast as torch's fused kernel (two cores of
    an AMD EPYC, 197 to 1025 tokens). Shapes: see `eager_attention_forward`.
    """
    size = torch.get_num_threads() * max(LOGITS_PER_THREAD // (query.shape[2] * key.shape[2]), 1)
    blocks = [states.flatten(0, 1).split(size) for states in (query, key, value)]
    unused = query.new_empty(())
    with torch.autocast("cpu", enabled=False):  # autocast would keep the probabilities in float32
        attended = [
            torch.bmm(F.softmax(torch.baddbmm(unused, q, k.transpose(1, 2), beta=0, alpha=scaling), dim=-1), v)
            for q, k, v in zip(*blocks, strict=True)
        ]
    return torch.cat(attended).view(query.shape).transpose(1, 2), None


def _prefers_blocks(query: torch.Tensor) -> bool:
    """Tell whether `blocked_attention_forward` is faster; compiled graphs keep torch's kernel."""
    is_cpu_bfloat16 = query.device.type == "cpu" and query.dtype == torch.bfloat16
    return is_cpu_bfloat16 and not is_recorded() and has_bfloat16_products()


@functools.cache
def has_bfloat16_products() -> bool:
    """Tell whether oneDNN multiplies in bfloat16 on this CPU."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_attention_forward(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args, scaling: float, **kwargs
) -> tuple[torch.Tensor, None]:
    """Compute attention by one oneDNN program, in which each core computes one head at a time; no mask, no dropout.

    In float32, on a CPU where oneDNN uses AVX-512 and MKL (which torch's fused kernel calls) does not, this is 1.3 to
    1.6 times as fast as that kernel (benchmarks/attention.py). `onednn_attends` tells when it is used. Shapes: see
    `eager_attention_forward`.
    """
    queries = query.shape[2]
    blocks = -(-queries * key.shape[2] // LOGITS_PER_THREAD)
    scale, key = _as_tensor(scaling), key.transpose(2, 3)
    attended = []
    for part in query.split(-(-queries // blocks), dim=2):
        layout = *((states.shape, states.stride()) for states in (part, key, value)), torch.get_num_threads()
        attended.append(_onednn_program(layout)(part, key, value, scale))
    return (attended[0] if blocks == 1 else torch.cat(attended, dim=2)).transpose(1, 2), None


@functools.lru_cache(maxsize=_PROGRAMS)
def _onednn_program(layout: tuple) -> Callable:
    """Build a oneDNN program for one layout.

    oneDNN compiles it at the first call, for that call's shapes, strides and threads, and does not check later calls.
    """
    program = torch._C.Graph()
    node: Any = program.create("prim::oneDNNFusionGroup", [program.addInput() for _ in range(4)], 1)
    node.g_("Subgraph", torch._C.parse_ir(_ATTENTION))
    node.is_("output_layouts", [0])  # strided, not one of oneDNN's own
    program.insertNode(node)
    program.registerOutput(node.output())
    return torch._C._create_function_from_graph("attention", program)


@functools.cache
@torch.inference_mode(False)
def _as_tensor(scaling: float) -> torch.Tensor:
    return torch.full((1,), scaling)


def onednn_attends(query: torch.Tensor) -> bool:
    """Tell whether `onednn_attention_forward` can be used and is faster.

    oneDNN computes one head at a time only if there are more than two for each thread; else it holds all logits.
    """
    if torch.is_grad_enabled() or is_recorded():
        return False
    if type(query) is not torch.Tensor or is_functorch_wrapped_tensor(query):
        return False
    is_cpu_float32 = query.device.type == "cpu" and query.dtype == torch.float32
    has_enough_heads = query.shape[0] * query.shape[1] > 2 * torch.get_num_threads() and query.shape[2] > 1
    is_mixed = torch.is_autocast_enabled("cpu")
    return is_cpu_float32 and has_enough_heads and not is_mixed and mkl_is_narrower() and has_onednn_attention()


@functools.cache
@torch.inference_mode()
def has_onednn_attention() -> bool:
    """Tell whether this build of torch runs such programs, and they compute attention correctly."""
    if not torch.backends.mkldnn.is_available():
        return False
    heads = 2 * torch.get_num_threads() + 1
    query, key, value = (torch.arange(heads * 35.0).add(shift).sin().view(1, heads, 5, 7) for shift in range(3))
    expected = F.scaled_dot_product_attention(query, key, value, scale=0.3).transpose(1, 2)
    try:
        for _ in range(3):  # torch optimises the surrounding graph in the second call
            attended, _ = onednn_attention_forward(nn.Module(), query, key, value, scaling=0.3)
    except (AttributeError, RuntimeError, TypeError):  # these functions of torch are internal
        return False
    return attended.shape == expected.shape and torch.allclose(attended, expected, rtol=0, atol=1e-5)


class HfViTAttention(nn.Module):
    """Multi-head self-attention over all tokens."""

    is_optimized = False  # set by `optimize_for_inference`

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
        is_plain = bias is None and dropout == 0
        attend = eager_attention_forward if kwargs.get("output_attentions") else self.implementation(query, is_plain)
        attended, attentions = attend(self, query, key, value, bias, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.o_proj(attended.flatten(2)), attentions

    def implementation(self, query: torch.Tensor, is_plain: bool) -> Callable:
        """Return the configured attention function, or a faster one; `is_plain` means no mask and no dropout."""
        name = self.config._attn_implementation or "eager"
        if name == "sdpa" and is_plain and _prefers_blocks(query):
            return blocked_attention_forward
        if name == "sdpa" and is_plain and self.is_optimized and onednn_attends(query):
            return onednn_attention_forward
        return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)

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
