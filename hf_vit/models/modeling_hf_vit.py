"""The Vision Transformer, from pixels to logits.

"An Image is Worth 16x16 Words" (arXiv 2010.11929). The computation is that of google-research/vision_transformer,
vit_jax/models_vit.py; parameters have the names of transformers' ViT.

The token sequence is the class token, if there is one, and then the patches in raster order. Models with other
embeddings or layers are subclasses in modeling_hf_vit_variants.py: hybrids, FlexiViT, batches of mixed image sizes, and
the paper's ablations.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vit import HfViTConfig
from .pretrained import HEAD_KEYS, HfVisionPreTrainedModel, HfViTHead, is_tracing, lecun_normal_
from .sizes import Grid, Size, as_pair, is_same_grid


class HfViTPatchEmbeddings(nn.Module):
    """Linear embedding of patches, as a convolution whose stride is its kernel size."""

    def __init__(self, config: HfViTConfig, num_channels: int):
        super().__init__()
        self.projection = nn.Conv2d(num_channels, config.hidden_size, config.kernel_size, stride=config.kernel_size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) -> (batch, rows * columns, hidden_size)"""
        patches = self.projection(pixel_values)  # (batch, hidden_size, rows, columns)
        return patches.flatten(2).transpose(1, 2)


class HfViTEmbeddings(nn.Module):
    """Input tokens of the encoder: patch embeddings, class token and position embeddings.

    Args:
        use_mask_token: add a mask token, which replaces masked patches.
    """

    def __init__(self, config: HfViTConfig, use_mask_token: bool = False):
        super().__init__()
        self.config = config
        self.patch_embeddings = self.build_patch_embeddings()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if config.use_cls_token else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if use_mask_token else None
        self.position_embeddings: Any = self.build_position_embeddings()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def build_patch_embeddings(self) -> HfViTPatchEmbeddings:
        """Build the embedding of patches."""
        return HfViTPatchEmbeddings(self.config, self.config.num_channels)

    def build_position_embeddings(self) -> nn.Parameter | None:
        """Build learned position embeddings; None if they are fixed or not added to the encoder's input."""
        config = self.config
        if config.position_embedding_type != "learned" or not config.adds_positions_to_input:
            return None
        rows, columns = config.stored_grid
        return nn.Parameter(torch.zeros(1, config.num_prefix_positions + rows * columns, config.hidden_size))

    def initialize(self) -> None:
        """Initialize position embeddings from a normal distribution, and class and mask token with zeros."""
        if isinstance(self.position_embeddings, nn.Parameter):
            init.normal_(self.position_embeddings, std=self.config.initializer_range)
        for token in (self.cls_token, self.mask_token):
            if token is not None:
                init.zeros_(token)

    def forward(
        self, pixel_values: torch.Tensor, grid: Grid, bool_masked_pos: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Embed images.

        Args:
            pixel_values: (batch, num_channels, height, width)
            grid: (rows, columns) of patches.
            bool_masked_pos: (batch, patches), True for patches that are replaced by the mask token.

        Returns:
            (batch, tokens, hidden_size)
        """
        patches = self.embed_patches(pixel_values)
        positions = self.position_embeddings_for(grid, patches)
        return self.add_positions(self.mask_patches(patches, bool_masked_pos), positions)

    def embed_patches(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, num_channels, height, width) -> (batch, rows * columns, hidden_size), in the weights' dtype"""
        return self.patch_embeddings(pixel_values.to(self.patch_embeddings.projection.weight.dtype))

    def mask_patches(self, patches: torch.Tensor, bool_masked_pos: torch.Tensor | None) -> torch.Tensor:
        """Replace masked patches, True in (batch, patches), by the mask token: (batch, patches, hidden_size)"""
        if bool_masked_pos is None:
            return patches
        if self.mask_token is None:
            raise ValueError("bool_masked_pos needs a mask token: load the model with use_mask_token=True")
        return torch.where(bool_masked_pos.bool().unsqueeze(-1), self.mask_token.to(patches.dtype), patches)

    def add_positions(self, patches: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Prepend the class token and add position embeddings.

        Args:
            patches: (batch, patches, hidden_size)
            positions: (1 or batch, num_prefix_positions + patches, hidden_size), or None.

        Returns:
            (batch, tokens, hidden_size)
        """
        tokens = patches
        if positions is not None and not self.config.num_prefix_positions:
            tokens = tokens + positions
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), tokens], dim=1)
        if positions is not None and self.config.num_prefix_positions:
            tokens = tokens + positions
        return self.dropout(tokens)

    def position_embeddings_for(self, grid: Grid, like: torch.Tensor) -> torch.Tensor | None:
        """Return the position embeddings for a grid of patches, resampled if it differs from the stored grid.

        Args:
            grid: (rows, columns)
            like: a tensor; fixed (sine-cosine) positions take its dtype and device.

        Returns:
            (1, num_prefix_positions + rows * columns, hidden_size); None if none are added to the encoder's input.
        """
        config = self.config
        if not config.adds_positions_to_input:
            return None
        if config.position_embedding_type == "sincos2d":
            return fixed_positions(grid, config.hidden_size, like=like)[0]
        if is_same_grid(grid, config.stored_grid):
            return self.position_embeddings
        return resize_position_embeddings(
            self.position_embeddings,
            config.stored_grid,
            grid,
            config.num_prefix_positions,
            config.position_interpolation,
        )


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
    """Compute attention; unlike the other implementations, return the attention probabilities too.

    The softmax is computed in float32, or in float64 for float64 inputs.

    Args:
        query: (batch, heads, queries, head_dim)
        key, value: (batch, heads, tokens, head_dim)
        attention_mask: broadcastable to (batch, heads, queries, tokens): True for allowed pairs, or a bias that is
            added to the logits.

    Returns:
        The output (batch, queries, heads, head_dim) and the probabilities (batch, heads, queries, tokens).
    """
    scores = apply_mask(torch.matmul(query, key.transpose(2, 3)) * scaling, attention_mask)
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    probabilities = F.softmax(scores, dim=-1, dtype=softmax_dtype).to(query.dtype)
    probabilities = F.dropout(probabilities, p=dropout, training=module.training)
    return torch.matmul(probabilities, value).transpose(1, 2), probabilities


def apply_mask(logits: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Apply a mask, True for allowed pairs, or add a bias to attention logits (batch, heads, queries, tokens)."""
    if attention_mask is None:
        return logits
    if attention_mask.dtype == torch.bool:
        return logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    return logits + attention_mask


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
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply self-attention.

        Args:
            hidden_states: (batch, tokens, hidden_size)
            attention_mask: as in `eager_attention_forward`.
            num_queries: number of leading tokens that are queries; None: all.

        Returns:
            (batch, queries, hidden_size); and the probabilities (batch, heads, queries, tokens) with
            `output_attentions=True`, otherwise None or what the attention implementation returns.
        """
        query = self.split_heads(self.q_proj(hidden_states[:, :num_queries]))
        key = self.split_heads(self.k_proj(hidden_states))
        value = self.split_heads(self.v_proj(hidden_states))
        attended, attentions = self.attend(query, key, value, attention_mask, **kwargs)
        return self.o_proj(attended.flatten(2)), attentions

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention with the chosen implementation; shapes as in `eager_attention_forward`."""
        name = "eager" if output_attentions else self.config._attn_implementation or "eager"
        compute = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        return compute(self, query, key, value, attention_mask, scaling=self.scaling, dropout=dropout, **kwargs)

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, heads, tokens, head_dim)"""
        return states.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class HfViTMLPLinear(nn.Linear):
    """Linear layer of an MLP."""

    def initialize(self) -> None:
        """Initialize as in the original: Xavier-uniform weights, normal biases with standard deviation 1e-6."""
        init.xavier_uniform_(self.weight)
        init.normal_(self.bias, std=1e-6)


class HfViTMLP(nn.Module):
    """MLP block: two linear layers with an activation in between."""

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
    """Stochastic depth (arXiv 1603.09382): drop a residual branch for random samples of the batch."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> the same; samples that are kept are scaled by 1 / (1 - rate)"""
        if not self.training or self.rate == 0:
            return branch
        keep = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.rate
        return branch * (keep / (1 - self.rate)).to(branch.dtype)


class HfViTLayer(GradientCheckpointingLayer):
    """Pre-norm encoder block, with dropout at the same points as Encoder1DBlock in vit_jax/models_vit.py.

    Args:
        layer_index: number of layers before this one, on which the rate of stochastic depth depends.
        attention: None: `HfViTAttention`.
    """

    def __init__(self, config: HfViTConfig, layer_index: int, attention: HfViTAttention | None = None):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = attention or HfViTAttention(config)
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = HfViTMLP(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = DropPath(config.drop_path_rate * layer_index / max(config.num_hidden_layers - 1, 1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        num_queries: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            hidden_states: (batch, tokens, hidden_size)
            attention_mask: as in `eager_attention_forward`.
            num_queries: number of leading tokens to compute; None: all.
            kwargs: for the attention.

        Returns:
            (batch, tokens or num_queries, hidden_size)
        """
        attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, num_queries, **kwargs)
        hidden_states = hidden_states[:, :num_queries] + self.drop_path(self.dropout(attended))
        return hidden_states + self.drop_path(self.mlp(self.layernorm_after(hidden_states)))


class HfViTMapPooling(nn.Module):
    """Multi-head attention pooling (big_vision's MAPHead): one learned query attends to all tokens; an MLP follows."""

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
        """Initialize the query, `probe`, with Xavier-uniform values."""
        init.xavier_uniform_(self.probe)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, hidden_size); `attention_mask` is (batch, 1, 1, tokens) or None"""
        query = self.split_heads(self.q_proj(self.probe)).expand(hidden_states.shape[0], -1, -1, -1)
        key = self.split_heads(self.k_proj(hidden_states))
        value = self.split_heads(self.v_proj(hidden_states))
        pooled = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        pooled = self.o_proj(pooled.transpose(1, 2).flatten(2))  # (batch, 1, hidden_size)
        return (pooled + self.mlp(self.layernorm(pooled)))[:, 0]

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, heads, tokens, head_dim)"""
        return states.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


class HfViTPreLogits(nn.Linear):
    """Pre-logits layer: a linear layer before the head."""

    def initialize(self) -> None:
        """Initialize the weights with flax's default, LeCun normal."""
        lecun_normal_(self.weight)


class HfViTPooler(nn.Module):
    """Pooling of the tokens to the head's input, with the optional pre-logits layer and tanh."""

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
            attention_mask: (batch, tokens), 0 or False for padding; None: no padding.
            norm: the final LayerNorm, if it is applied after the pooling.
        """
        if self.first_token:
            hidden_states = hidden_states[:, self.first_token :]
            if attention_mask is not None:
                attention_mask = attention_mask[:, self.first_token :]
        pooled = self.pool(hidden_states, attention_mask)
        if norm is not None:
            pooled = norm(pooled)
        return pooled if self.dense is None else torch.tanh(self.dense(pooled))

    def pool(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, hidden_size); with pooling "none", unchanged"""
        if self.pooling == "cls":
            return hidden_states[:, 0]
        if self.pooling == "none":
            return hidden_states
        if self.map is not None:
            if attention_mask is not None:
                attention_mask = attention_mask[:, None, None, :].bool()
            return self.map(hidden_states, attention_mask)
        if attention_mask is None:
            return hidden_states.mean(dim=1)
        real = hidden_states * attention_mask.to(hidden_states.dtype).unsqueeze(-1)
        sum_dtype = torch.promote_types(real.dtype, torch.float32)  # a sum over many tokens can overflow float16
        num_real = attention_mask.sum(dim=1, keepdim=True, dtype=sum_dtype)
        return (real.sum(dim=1, dtype=sum_dtype) / num_real).to(real.dtype)


@dataclass
class HfViTModelOutput(BaseModelOutputWithPooling):
    """Output of `HfViTModel`: the fields of transformers' `BaseModelOutputWithPooling`, and `image_embeds`.

    Args:
        image_embeds: projection of `pooler_output`, not L2-normalized: (batch, projection_dim), or
            (batch, tokens, projection_dim) with pooling "none"; None for a model without a projection.
    """

    image_embeds: torch.FloatTensor | None = None


# Patterns of checkpoint parameters that only some of the classes have.
_MASKED_PATCH_KEYS = [r"^mask_token$", r"^predictor\.", r"^(vit\.)?embeddings\.mask_token$"]
_PROJECTION_KEYS = [r"^(vit\.)?projection\."]  # of an image-text model


class HfViTPreTrainedModel(HfVisionPreTrainedModel):
    """Base class of the Vision Transformers."""

    config: HfViTConfig
    base_model_prefix = "vit"
    _no_split_modules = ["HfViTEmbeddings", "HfViTLayer"]  # noqa: RUF012 - transformers declares the type
    _can_record_outputs = {"hidden_states": HfViTLayer, "attentions": HfViTAttention}  # noqa: RUF012
    _input_embed_layer = "patch_embeddings"
    # Unused when only the encoder is loaded.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        HEAD_KEYS,
        r"^pooler\.",
        *_PROJECTION_KEYS,
        *_MASKED_PATCH_KEYS,
    ]

    def grid_of(self, pixel_values: torch.Tensor) -> Grid:
        """Return the (rows, columns) of patches of images (batch, num_channels, height, width).

        Raises:
            ValueError: the number of channels is wrong, or the image size is not a multiple of the patch size.
        """
        return self.config.grid_of(*self.check_images(pixel_values))

    @torch.no_grad()
    def set_image_size(self, image_size: Size) -> None:
        config = self.config
        if as_pair(image_size) == as_pair(config.image_size):
            return
        grid = config.grid_of(*as_pair(image_size))
        embeddings: Any = self.base_model.embeddings
        table = embeddings.position_embeddings
        if table is not None:
            resized = embeddings.position_embeddings_for(grid, table)
            embeddings.position_embeddings = nn.Parameter(resized, table.requires_grad)
        config.image_size_history = [*(config.image_size_history or []), config.image_size]
        config.image_size = image_size


class HfViTEncoder(HfViTPreTrainedModel):
    """Embeddings, layers and the final LayerNorm: base class of the model and the backbone."""

    def __init__(self, config: HfViTConfig, use_mask_token: bool = False):
        super().__init__(config)
        self.embeddings = self.build_embeddings(use_mask_token)
        self.layers = self.build_layers()
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def build_embeddings(self, use_mask_token: bool) -> HfViTEmbeddings:
        """Build the module of the input tokens."""
        if not self.config.is_plain:
            raise ValueError("this configuration has other embeddings or layers than a plain ViT: install hf_vit")
        return HfViTEmbeddings(self.config, use_mask_token)

    def build_layers(self) -> nn.ModuleList:
        """Build the encoder blocks."""
        return nn.ModuleList(HfViTLayer(self.config, index) for index in range(self.config.num_hidden_layers))

    def post_init(self) -> None:
        """Finish the construction; if the model has no pooler, ignore the pooler in a classifier's checkpoint."""
        super().post_init()
        if getattr(self, "pooler", None) is None:
            ignored: Any = self._keys_to_ignore_on_load_unexpected
            ignored.add(r"^vit\.pooler\.")

    def encode(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        num_queries: int | None = None,
        returned_layers: Collection[int] = (),
        **kwargs: Any,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the layers.

        Args:
            hidden_states: (batch, tokens, hidden_size)
            attention_mask: (batch, tokens), 0 for padding; None: no padding.
            num_queries: number of leading tokens that the last layer computes; None: all.
            returned_layers: indices of layers whose outputs are returned too.
            kwargs: for the layers.

        Returns:
            The output of the last layer, before the final LayerNorm, (batch, tokens or num_queries, hidden_size); and a
            list of the outputs of `returned_layers`.
        """
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        if attention_mask is not None:
            if kwargs["output_attentions"] or self.config._attn_implementation in ("eager", "sdpa"):
                attention_mask = attention_mask[:, None, None, :].bool()
            else:  # in the kernel's own format; transformers reads the mask's values, which waits for the device
                attention_mask = create_bidirectional_mask(
                    config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
                )
        returned = []
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            queries = num_queries if index == last else None
            hidden_states = layer(hidden_states, attention_mask, queries, **kwargs)
            if index in returned_layers:
                returned.append(hidden_states)
        return hidden_states, returned


class HfViTModel(HfViTEncoder):
    """Vision Transformer without a head; with an image-text model's projection if `config.projection_dim` is set.

    Args:
        add_pooling_layer: compute `pooler_output`, the input of a head or of the projection.
        use_mask_token: add a mask token for `bool_masked_pos`; a new mask token is initialized with zeros.
    """

    _new_when_missing = ("embeddings.mask_token",)
    _reinit_message = "{name} has no mask token; a new one is initialized with zeros. Train it before use."

    def __init__(self, config: HfViTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False):
        super().__init__(config, use_mask_token)
        self.pooler = HfViTPooler(config) if add_pooling_layer else None
        self.projection = None
        if add_pooling_layer and config.projection_dim is not None:
            self.projection = nn.Linear(config.representation_size or config.hidden_size, config.projection_dim)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        bool_masked_pos: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        only_pooled: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTModelOutput:
        """Run the encoder.

        Args:
            pixel_values: (batch, num_channels, height, width) in [-1, 1]; height and width are any multiples of the
                patch size.
            bool_masked_pos: (batch, patches), True for patches that are replaced by the mask token; needs
                `use_mask_token`.
            interpolate_pos_encoding: True suppresses the warning about images whose size differs from the configured
                size. The position embeddings are resampled in any case.
            attention_mask: (batch, tokens), 1 for real tokens and 0 for padding; None: no padding.
            only_pooled: compute only `pooler_output`. With class-token pooling, `last_hidden_state` then has only the
                class token, unless there is an attention mask, or hidden states or attentions are returned.

        Returns:
            `last_hidden_state`: (batch, tokens, hidden_size) after the final LayerNorm (before it, with
            `norm_after_pooling`).
            `pooler_output`: (batch, representation_size or hidden_size), or (batch, tokens, ...) with pooling "none".
            `image_embeds`: see `HfViTModelOutput`.
            `hidden_states`: (batch, tokens, hidden_size), the input of the first layer and the output of every layer.
            `attentions`: (batch, heads, tokens, tokens) for every layer, with any attention implementation.
        """
        self.check_forward_arguments(kwargs)
        grid = self.grid_of(pixel_values)
        self.warn_about_image_size(pixel_values, interpolate_pos_encoding)
        hidden_states = self.embeddings(pixel_values, grid, bool_masked_pos)
        return self.encode_and_pool(hidden_states, attention_mask, only_pooled, **kwargs)

    def encode_and_pool(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, only_pooled: bool, **kwargs: Any
    ) -> HfViTModelOutput:
        """Run the layers, the final LayerNorm and the pooling; arguments and result as in `forward`.

        Args:
            hidden_states: (batch, tokens, hidden_size), from the embeddings.
        """
        # With class-token pooling, the head needs no other token of the last layer.
        recorded = ("output_hidden_states", "output_attentions")  # of all tokens
        is_recorded = any(kwargs.get(name, getattr(self.config, name)) for name in recorded)
        needs_all = self.config.pooling != "cls" or attention_mask is not None or is_recorded
        num_queries = 1 if only_pooled and not needs_all else None
        hidden_states, _ = self.encode(hidden_states, attention_mask, num_queries, **kwargs)
        norm = None
        if self.config.norm_after_pooling:
            norm = self.layernorm
        else:
            hidden_states = self.layernorm(hidden_states)
        pooler_output = None if self.pooler is None else self.pooler(hidden_states, attention_mask, norm)
        image_embeds = None if self.projection is None else self.projection(pooler_output)
        return HfViTModelOutput(last_hidden_state=hidden_states, pooler_output=pooler_output, image_embeds=image_embeds)


class HfViTForImageClassification(HfViTPreTrainedModel):
    """Vision Transformer with a linear classification head; an image-text model's projection is ignored."""

    encoder_class = HfViTModel
    _keys_to_ignore_on_load_unexpected = [*_PROJECTION_KEYS, *_MASKED_PATCH_KEYS]  # noqa: RUF012

    def __init__(self, config: HfViTConfig):
        super().__init__(config.without_projection())
        self.vit = self.encoder_class(self.config)
        self.classifier = HfViTHead(
            config.representation_size or config.hidden_size, config.num_labels, config.initial_head_std
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify images; the other arguments are those of `HfViTModel.forward`.

        Args:
            labels: (batch,) class indices; or (batch, num_labels) for multi-label classification or regression.

        Returns:
            `logits`: (batch, num_labels), or (batch, tokens, num_labels) with pooling "none".
            `loss`: a scalar, if `labels` is given.
        """
        outputs = self.vit(
            pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            attention_mask=attention_mask,
            only_pooled=True,
            return_dict=True,
            **kwargs,
        )
        logits = self.classifier(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class HfViTBackbone(BackboneMixin, HfViTEncoder):
    """Feature maps of any layers for detection, segmentation and depth, or sequences of tokens."""

    def __init__(self, config: HfViTConfig):
        super().__init__(config.without_projection())
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> BackboneOutput:
        """Compute feature maps; the arguments are those of `HfViTModel.forward`.

        Returns:
            `feature_maps`: (batch, hidden_size, rows, columns) for each name in `out_features`; without
            `reshape_hidden_states` (batch, tokens, hidden_size), with the class token.
        """
        self.check_forward_arguments(kwargs)
        grid = self.grid_of(pixel_values)
        return self.encode_to_maps(self.embeddings(pixel_values, grid), grid, **kwargs)

    def encode_to_maps(self, tokens: torch.Tensor, grid: Grid, /, **kwargs: Any) -> BackboneOutput:
        """Run the layers; the result is as in `forward`.

        Args:
            tokens: (batch, tokens, hidden_size), from the embeddings.
            grid: (rows, columns) of patches.
        """
        stages = [index for index, name in enumerate(self.stage_names) if name in self.out_features]  # 0: "stem"
        _, maps = self.encode(tokens, returned_layers=[stage - 1 for stage in stages], **kwargs)
        if 0 in stages:
            maps = [tokens, *maps]
        if self.config.apply_layernorm:
            maps = [self.layernorm(states) for states in maps]
        if self.config.reshape_hidden_states:
            patches = (states[:, self.config.num_prefix_tokens :] for states in maps)
            maps = [states.transpose(1, 2).unflatten(2, grid) for states in patches]
        feature_maps: Any = tuple(maps)  # `Any`, because transformers declares a tuple of one tensor
        return BackboneOutput(feature_maps=feature_maps)
