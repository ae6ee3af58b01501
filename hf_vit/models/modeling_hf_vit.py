"""The Vision Transformer, from pixels to logits, and the hybrids, which apply it to the feature map of a ResNet stem.

"An Image is Worth 16x16 Words" (arXiv 2010.11929). The computation is that of google-research/vision_transformer,
vit_jax/models_vit.py; parameters have the names of transformers' ViT.

The token sequence is the class token, if there is one, and then the patches in raster order. The position embeddings
are in position_embeddings.py, relative and axial attention in attention_variants.py, other patch sizes and batches of
mixed image sizes in flexible_sizes.py, and the ResNet stem in resnet_stem.py.
"""

from collections.abc import Collection
from dataclasses import dataclass
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

from .configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from .flexible_sizes import FlexibleSizes, embed_mixed_sizes, keep_patches, patch_mask, resize_patch_kernel
from .position_embeddings import (
    Grid,
    PositionTables,
    build_layer_tables,
    build_tables,
    fixed_positions,
    resize_position_embeddings,
)
from .pretrained import HEAD_KEYS, HfVisionPreTrainedModel, HfViTHead, lecun_normal_
from .resnet_stem import ResNetStem
from .sizes import Size, is_same_grid


class HfViTPatchEmbeddings(nn.Module):
    """Linear embedding of patches, as a convolution whose stride is its kernel size."""

    def __init__(self, config: HfViTConfig, num_channels: int):
        super().__init__()
        self.config = config
        self.projection = nn.Conv2d(num_channels, config.hidden_size, config.kernel_size, stride=config.kernel_size)

    def forward(self, pixel_values: torch.Tensor, patch_size: tuple[int, int] | None = None) -> torch.Tensor:
        """(batch, channels, height, width) -> (batch, rows * columns, hidden_size)"""
        if patch_size is None or patch_size == self.config.kernel_size:
            patches = self.projection(pixel_values)  # (batch, hidden_size, rows, columns)
        elif not isinstance(self.projection, nn.Conv2d):  # PEFT's, whose low-rank part has no kernel to resize
            raise ValueError(f"the patch embedding has an adapter, which needs patch_size {self.config.kernel_size}")
        else:
            kernel = resize_patch_kernel(self.projection.weight, patch_size)
            patches = F.conv2d(pixel_values, kernel, self.projection.bias, stride=patch_size)
        return patches.flatten(2).transpose(1, 2)


class HfViTEmbeddings(nn.Module):
    """Input tokens of the encoder: patch embeddings, class token and position embeddings.

    A hybrid embeds patches of the stem's feature map.

    Args:
        use_mask_token: add a mask token, which replaces masked patches.
    """

    def __init__(self, config: HfViTConfig, use_mask_token: bool = False):
        super().__init__()
        self.config = config
        self.stem, num_channels = None, config.num_channels
        # not isinstance, because remote code has its own copy of the class
        if config.model_type == HfViTHybridConfig.model_type:
            self.stem = ResNetStem(config, config.stem_width, config.stem_depths)
            num_channels = self.stem.out_channels
        self.patch_embeddings = HfViTPatchEmbeddings(config, num_channels)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if config.use_cls_token else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if use_mask_token else None
        self.position_embeddings: Any = None
        if config.adds_positions_to_input and config.position_embedding_type == "learned":
            rows, columns = config.stored_grid
            num_positions = config.num_prefix_positions + rows * columns
            self.position_embeddings = nn.Parameter(torch.zeros(1, num_positions, config.hidden_size))
        elif config.adds_positions_to_input and config.position_embedding_type == "learned2d":
            self.position_embeddings = build_tables(config, count=1)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def initialize(self) -> None:
        """Initialize position embeddings from a normal distribution, and class and mask token with zeros."""
        if isinstance(self.position_embeddings, nn.Parameter):
            init.normal_(self.position_embeddings, std=self.config.initializer_range)
        for token in (self.cls_token, self.mask_token):
            if token is not None:
                init.zeros_(token)

    def forward(
        self,
        pixel_values: torch.Tensor,
        grid: Grid | None = None,
        spatial_shapes: torch.Tensor | list[list[int]] | None = None,
        patch_size: Size | None = None,
        bool_masked_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embed images.

        Args:
            pixel_values: (batch, num_channels, height, width); or, with `spatial_shapes`, images of different sizes as
                patches, (batch, patches, patch height * patch width * num_channels), from `HfViTImageProcessor` with
                the preset "native".
            grid: (rows, columns) of patches; None: computed from `pixel_values`. Unused with `spatial_shapes`.
            spatial_shapes: (batch, 2), rows and columns of patches of each image.
            patch_size: patch size for this forward pass of a flexible model; see `HfViTConfig.resolve_patch_size`.
            bool_masked_pos: (batch, patches), True for patches that are replaced by the mask token.

        Returns:
            (batch, tokens, hidden_size)
        """
        if spatial_shapes is None:
            height, width = pixel_values.shape[-2:]
            grid = grid or self.config.grid_of(height, width, patch_size)
            patches = self.embed_patches(pixel_values, patch_size)
            positions = self.position_embeddings_for(grid, patches)
        else:
            patch_size = self.config.resolve_patch_size(patch_size)
            patches, positions = embed_mixed_sizes(self, pixel_values, spatial_shapes, patch_size)
        if bool_masked_pos is not None:
            if self.mask_token is None:
                raise ValueError("bool_masked_pos needs a mask token: load the model with use_mask_token=True")
            patches = torch.where(bool_masked_pos.bool().unsqueeze(-1), self.mask_token.to(patches.dtype), patches)
        return self.add_positions(patches, positions)

    def embed_patches(self, pixel_values: torch.Tensor, patch_size: Size | None = None) -> torch.Tensor:
        """(batch, num_channels, height, width) -> (batch, rows * columns, hidden_size), in the weights' dtype"""
        feature_map = pixel_values.to(self.patch_embeddings.projection.weight.dtype)
        if self.stem is not None:
            feature_map = self.stem(feature_map)
        return self.patch_embeddings(feature_map, self.config.resolve_patch_size(patch_size))

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
        if isinstance(self.position_embeddings, PositionTables):
            return self.position_embeddings(grid)
        if is_same_grid(grid, config.stored_grid):
            return self.position_embeddings
        method = config.position_interpolation
        return resize_position_embeddings(
            self.position_embeddings, config.stored_grid, grid, config.num_prefix_positions, method
        )


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
        grid: Grid | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply self-attention.

        Args:
            hidden_states: (batch, tokens, hidden_size)
            attention_mask: as in `eager_attention_forward`.
            num_queries: number of leading tokens that are queries; None: all.
            grid: (rows, columns) of patches, for subclasses.

        Returns:
            (batch, queries, hidden_size); and the probabilities (batch, heads, queries, tokens) with
            `output_attentions=True`, otherwise None or what the attention implementation returns.
        """
        query = self.split_heads(self.q_proj(hidden_states[:, :num_queries]))
        key = self.split_heads(self.k_proj(hidden_states))
        value = self.split_heads(self.v_proj(hidden_states))
        bias = self.attention_bias(query, attention_mask, grid)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        name = "eager" if kwargs.get("output_attentions") else self.config._attn_implementation or "eager"
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        attended, attentions = attend(self, query, key, value, bias, scaling=self.scaling, dropout=dropout, **kwargs)
        return self.o_proj(attended.flatten(2)), attentions

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, heads, tokens, head_dim)"""
        return states.unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    def attention_bias(
        self, query: torch.Tensor, attention_mask: torch.Tensor | None, grid: Grid | None
    ) -> torch.Tensor | None:
        """Return the mask or bias of the attention logits; subclasses add relative positions."""
        return attention_mask


def build_attention(config: HfViTConfig, layer_index: int) -> HfViTAttention:
    """Build the attention module of a layer."""
    if config.attention_axes == "all" and config.position_embedding_type != "relative":
        return HfViTAttention(config)
    from .attention_variants import HfViTAxialAttention, HfViTRelativeAttention  # they import this file

    if config.attention_axes == "axial":
        return HfViTAxialAttention(config, along_columns=layer_index % 2 == 1)
    return HfViTRelativeAttention(config)


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
    """Pre-norm encoder block, with dropout at the same points as Encoder1DBlock in vit_jax/models_vit.py."""

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
        """Run the layer.

        Args:
            hidden_states: (batch, tokens, hidden_size)
            attention_mask: as in `eager_attention_forward`.
            num_queries: number of leading tokens to compute; None: all.
            positions: (tokens, hidden_size), position embeddings of this layer; None: no position embeddings.

        Returns:
            (batch, tokens or num_queries, hidden_size)
        """
        if positions is not None:
            hidden_states = hidden_states + positions
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
        key, value = self.split_heads(self.k_proj(hidden_states)), self.split_heads(self.v_proj(hidden_states))
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
            attention_mask = None if attention_mask is None else attention_mask[:, self.first_token :]
        pooled = self.pool(hidden_states, attention_mask)
        pooled = pooled if norm is None else norm(pooled)
        return pooled if self.dense is None else torch.tanh(self.dense(pooled))

    def pool(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, hidden_size); with pooling "none", unchanged"""
        if self.pooling == "cls":
            return hidden_states[:, 0]
        if self.pooling == "none":
            return hidden_states
        if self.map is not None:
            return self.map(hidden_states, None if attention_mask is None else attention_mask[:, None, None, :].bool())
        if attention_mask is None:
            return hidden_states.mean(dim=1)
        real = hidden_states * attention_mask.to(hidden_states.dtype).unsqueeze(-1)
        sum_dtype = torch.promote_types(real.dtype, torch.float32)  # a sum over many tokens can overflow float16
        num_real = attention_mask.sum(dim=1, keepdim=True, dtype=sum_dtype)
        return (real.sum(dim=1, dtype=sum_dtype) / num_real).to(real.dtype)

    def token_weights(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> (batch, tokens): the weight of each token in the pooled one, of sum 1

        With attention pooling, it is the attention of the probe, the mean over the heads.
        """
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        weights = torch.zeros_like(hidden_states[..., 0], dtype=dtype)
        pooled = hidden_states[:, self.first_token :]
        if self.pooling == "cls":
            weights[:, 0] = 1
        elif self.map is None:
            weights[:, self.first_token :] = 1 / pooled.shape[1]
        else:
            query = self.map.split_heads(self.map.q_proj(self.map.probe)).to(dtype)  # (1, heads, 1, head_dim)
            key = self.map.split_heads(self.map.k_proj(pooled)).to(dtype)  # (batch, heads, tokens, head_dim)
            scores = (query @ key.transpose(2, 3))[:, :, 0] * key.shape[-1] ** -0.5
            weights[:, self.first_token :] = scores.softmax(dim=-1).mean(dim=1)
        return weights


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


class HfViTPreTrainedModel(FlexibleSizes, HfVisionPreTrainedModel):
    """Base class of the Vision Transformers and the hybrids."""

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

    @property
    def tokens_per_image(self) -> int:
        """Number of tokens for an image of the configured size."""
        rows, columns = self.config.grid_size
        return self.config.num_prefix_tokens + rows * columns

    @torch.no_grad()
    def drop_class_position(self) -> None:
        """Add the position of the class token to the token itself, and set `no_embed_class`; outputs do not change.

        For models with learned positions at the input.
        """
        embeddings: Any = self.base_model.embeddings
        table = embeddings.position_embeddings  # (1, 1 + patches, hidden_size)
        embeddings.cls_token += table[:, :1]
        embeddings.position_embeddings = nn.Parameter(table[:, 1:].clone(), table.requires_grad)
        self.config.no_embed_class = True

    def grid_of(self, pixel_values: torch.Tensor, patch_size: Size | None = None) -> Grid:
        """Return the (rows, columns) of patches of images (batch, num_channels, height, width).

        Raises:
            ValueError: the number of channels is wrong, or the image size is not a multiple of the patch size.
        """
        self.check_images(pixel_values)
        height, width = pixel_values.shape[-2:]
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage] - it is public; tensors there
            height, width = int(height), int(width)
        return self.config.grid_of(height, width, patch_size)


class HfViTEncoder(HfViTPreTrainedModel):
    """Embeddings, layers and the final LayerNorm: base class of the model and the backbone."""

    def __init__(self, config: HfViTConfig, use_mask_token: bool = False):
        super().__init__(config)
        self.embeddings = HfViTEmbeddings(config, use_mask_token)
        self.layer_position_embeddings = build_layer_tables(config)
        self.layers = nn.ModuleList(HfViTLayer(config, index) for index in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def post_init(self) -> None:
        """Finish the construction; if the model has no pooler, ignore the pooler in a classifier's checkpoint."""
        super().post_init()
        if getattr(self, "pooler", None) is None:
            ignored: Any = self._keys_to_ignore_on_load_unexpected
            ignored.add(r"^vit\.pooler\.")

    def encode(
        self,
        hidden_states: torch.Tensor,
        grid: Grid | None,
        attention_mask: torch.Tensor | None = None,
        num_queries: int | None = None,
        returned_layers: Collection[int] = (),
        **kwargs: Any,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the layers.

        Args:
            hidden_states: (batch, tokens, hidden_size)
            grid: (rows, columns) of patches, the same for all images; None if the images have different grids.
            attention_mask: (batch, tokens), 0 for padding; None: no padding.
            num_queries: number of leading tokens that the last layer computes; None: all.
            returned_layers: indices of layers whose outputs are returned too.

        Returns:
            The output of the last layer, before the final LayerNorm, (batch, tokens or num_queries, hidden_size); and a
            list of the outputs of `returned_layers`.
        """
        kwargs["output_attentions"] = kwargs.get("output_attentions", self.config.output_attentions)
        if attention_mask is not None:
            if kwargs["output_attentions"] or self.config._attn_implementation in ("eager", "sdpa"):
                attention_mask = attention_mask[:, None, None, :].bool()
            else:  # in the kernel's own format; transformers reads the mask's values, which waits for the device
                attention_mask = create_bidirectional_mask(
                    config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
                )
        positions = [None] * len(self.layers)  # of each layer: (tokens, hidden_size)
        if self.layer_position_embeddings is not None:
            positions = self.layer_position_embeddings(grid).expand(len(self.layers), -1, -1)
        last, returned = len(self.layers) - 1, []
        for index, layer in enumerate(self.layers):
            queries = num_queries if index == last else None
            hidden_states = layer(hidden_states, attention_mask, queries, positions[index], grid=grid, **kwargs)
            if index in returned_layers:
                returned.append(hidden_states)
        return hidden_states, returned


class HfViTModel(HfViTEncoder):
    """Vision Transformer without a head; with an image-text model's projection if `config.projection_dim` is set.

    Args:
        add_pooling_layer: compute `pooler_output`, the input of a head or of the projection.
        use_mask_token: add a mask token for `bool_masked_pos`; a new mask token is initialized with zeros.

    Example:
        >>> import torch
        >>> from hf_vit import HfViTConfig, HfViTModel
        >>> model = HfViTModel(HfViTConfig(num_hidden_layers=1, pooling="mean"))
        >>> model(torch.zeros(2, 3, 224, 320)).last_hidden_state.shape
        torch.Size([2, 280, 768])
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
        pixel_attention_mask: torch.Tensor | None = None,
        spatial_shapes: torch.Tensor | list[list[int]] | None = None,
        keep: torch.Tensor | None = None,
        patch_size: Size | None = None,
        only_pooled: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTModelOutput:
        """Run the encoder.

        Args:
            pixel_values: (batch, num_channels, height, width) in [-1, 1]; height and width are any multiples of the
                patch size. Or, with `spatial_shapes`, images of different sizes as patches,
                (batch, patches, patch height * patch width * num_channels).
            bool_masked_pos: (batch, patches), True for patches that are replaced by the mask token; needs
                `use_mask_token`.
            interpolate_pos_encoding: True suppresses the warning about images whose size differs from the configured
                size. The position embeddings are resampled in any case.
            attention_mask: (batch, tokens), 1 for real tokens and 0 for padding; None: no padding.
            pixel_attention_mask: (batch, patches), 1 for real patches and 0 for padding; None: derived from
                `spatial_shapes`.
            spatial_shapes: (batch, 2), rows and columns of patches of each image. A list or a CPU tensor avoids a
                synchronization with the device.
            keep: (batch, kept), indices of the patches to process, row by row, -1 for padding; the others are dropped
                after their positions were added, and the class token stays. None: all patches.
            patch_size: patch size for this forward pass of a flexible model, an int or (height, width); None: that of
                the configuration.
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
        grid = None
        if spatial_shapes is None:
            grid = self.grid_of(pixel_values, patch_size)
            self.warn_about_image_size(pixel_values, interpolate_pos_encoding)
        elif pixel_attention_mask is None:
            pixel_attention_mask = patch_mask(spatial_shapes, pixel_values)
        hidden_states = self.embeddings(pixel_values, grid, spatial_shapes, patch_size, bool_masked_pos)
        if keep is not None:
            hidden_states, pixel_attention_mask = keep_patches(hidden_states, keep, self.config)
        if pixel_attention_mask is not None:
            attention_mask = F.pad(pixel_attention_mask, (self.config.num_prefix_tokens, 0), value=1)
        # With class-token pooling, the head needs no other token of the last layer.
        recorded = ("output_hidden_states", "output_attentions")  # of all tokens
        is_recorded = any(kwargs.get(name, getattr(self.config, name)) for name in recorded)
        only_cls = only_pooled and self.config.pooling == "cls" and attention_mask is None and not is_recorded
        hidden_states, _ = self.encode(hidden_states, grid, attention_mask, 1 if only_cls else None, **kwargs)
        norm_after = self.layernorm if self.config.norm_after_pooling else None
        last_hidden_state = hidden_states if norm_after else self.layernorm(hidden_states)
        pooler_output = None if self.pooler is None else self.pooler(last_hidden_state, attention_mask, norm_after)
        image_embeds = None if self.projection is None else self.projection(pooler_output)
        return HfViTModelOutput(
            last_hidden_state=last_hidden_state, pooler_output=pooler_output, image_embeds=image_embeds
        )


class HfViTForImageClassification(HfViTPreTrainedModel):
    """Vision Transformer with a linear classification head, which is new as `head_init` says.

    An image-text model's projection is ignored.

    Example:
        >>> from hf_vit import HfViTForImageClassification
        >>> model = HfViTForImageClassification.from_pretrained("folder", image_size=384)
        >>> model.config.grid_size
        (24, 24)
    """

    _keys_to_ignore_on_load_unexpected = [*_PROJECTION_KEYS, *_MASKED_PATCH_KEYS]  # noqa: RUF012

    def __init__(self, config: HfViTConfig):
        super().__init__(config.without_projection())
        self.vit = HfViTModel(self.config)
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
        *,
        patch_size: Size | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify images; the other arguments are those of `HfViTModel.forward`.

        Args:
            labels: (batch,) class indices; or (batch, num_labels) for multi-label classification or regression.

        Returns:
            `logits`: (batch, num_labels), or (batch, tokens, num_labels) with pooling "none".
            `loss`: a scalar, if `labels` is given.
        """
        sizes = {"interpolate_pos_encoding": interpolate_pos_encoding, "patch_size": patch_size}
        outputs = self.vit(
            pixel_values, attention_mask=attention_mask, only_pooled=True, return_dict=True, **sizes, **kwargs
        )
        logits = self.classifier(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class HfViTBackbone(BackboneMixin, HfViTEncoder):
    """Feature maps of any layers for detection, segmentation and depth; the final LayerNorm is applied to each.

    With `reshape_hidden_states=False`, they are sequences of tokens, as DPT, Depth Anything, ZoeDepth and VitPose take
    them; with `apply_layernorm=False`, the LayerNorm is left out.

    Example:
        >>> import torch
        >>> from hf_vit import HfViTBackbone, HfViTConfig
        >>> backbone = HfViTBackbone(HfViTConfig(num_hidden_layers=2, out_features=["stage1", "stage2"]))
        >>> [feature_map.shape for feature_map in backbone(torch.zeros(1, 3, 224, 320)).feature_maps]
        [torch.Size([1, 768, 14, 20]), torch.Size([1, 768, 14, 20])]
    """

    def __init__(self, config: HfViTConfig):
        super().__init__(config.without_projection())
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor, *, patch_size: Size | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> BackboneOutput:
        """Compute feature maps; the arguments are those of `HfViTModel.forward`.

        Returns:
            `feature_maps`: (batch, hidden_size, rows, columns) for each name in `out_features`; without
            `reshape_hidden_states` (batch, tokens, hidden_size), with the class token.
        """
        self.check_forward_arguments(kwargs)
        grid = self.grid_of(pixel_values, patch_size)
        tokens = self.embeddings(pixel_values, grid, patch_size=patch_size)
        stages = [index for index, name in enumerate(self.stage_names) if name in self.out_features]  # 0: "stem"
        _, maps = self.encode(tokens, grid, returned_layers=[stage - 1 for stage in stages], **kwargs)
        if 0 in stages:
            maps = [tokens, *maps]
        if self.config.apply_layernorm:
            maps = [self.layernorm(states) for states in maps]
        if self.config.reshape_hidden_states:
            patches = (states[:, self.config.num_prefix_tokens :] for states in maps)
            maps = [states.transpose(1, 2).unflatten(2, grid) for states in patches]
        feature_maps: Any = tuple(maps)  # `Any`, because transformers declares a tuple of one tensor
        return BackboneOutput(feature_maps=feature_maps)


class HfViTHybridModel(HfViTModel):
    """Hybrid (ResNet stem and Vision Transformer) without a head; see `HfViTModel`."""

    config: HfViTHybridConfig


class HfViTHybridForImageClassification(HfViTForImageClassification):
    """Hybrid (ResNet stem and Vision Transformer) with a linear head; see `HfViTForImageClassification`."""

    config: HfViTHybridConfig


class HfViTHybridBackbone(HfViTBackbone):
    """Feature maps of a hybrid (ResNet stem and Vision Transformer); see `HfViTBackbone`."""

    config: HfViTHybridConfig
