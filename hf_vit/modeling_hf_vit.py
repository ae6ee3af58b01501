"""The Vision Transformer and its hybrids: one encoder, with or without a ResNet in front.

Parameter names are those of transformers' ViT, so that weights move between the two by config alone. Shapes: tokens are
the class token, if there is one, and the patches, row by row.
"""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.configuration_utils import PreTrainedConfig
from transformers.core_model_loading import WeightRenaming
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import logging
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import HfViTAttention, build_attention
from .configuration_hf_vit import HfViTConfig, HfViTHybridConfig, Size, as_pair
from .inference import optimize, restore
from .position_embeddings import Grid, is_same, resize_position_embeddings, sincos2d
from .position_tables import PositionTables, build_layer_tables, build_tables, positions_of_layers
from .resnet_stem import ResNetStem, StemNumbers
from .upstream_vit import REBUILDS_PIXELS, WEIGHT_NAMES, is_upstream

logger = logging.get_logger(__name__)

# Standard deviation of a normal distribution cut at two of its own: jax.nn.initializers corrects for it.
TRUNCATED_STD = 0.87962566103423978
CACHED_GRIDS = 16
# What `HfViTForMaskedPatchPrediction` has besides the encoder.
MASKED_PATCH_KEYS = [r"^mask_token$", r"^predictor\."]
CONVERSION_RECORD = "conversion.json"
RECORDS = ("output_hidden_states", "output_attentions")  # what shows more than the result
# Arguments of `push_to_hub`, where `save_pretrained` is to call it.
HUB_OPTIONS = ("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags")


def stem_numbers(config: HfViTHybridConfig) -> StemNumbers:
    return StemNumbers(config.group_norm_eps, config.weight_standardization_eps, config.weight_standardization_form)


class HfViTPatchEmbeddings(nn.Module):
    def __init__(self, config: HfViTConfig, num_channels: int):
        super().__init__()
        patch_size = as_pair(config.patch_size)
        self.projection = nn.Conv2d(num_channels, config.hidden_size, patch_size, stride=patch_size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) -> (batch, rows * columns, hidden_size)"""
        return self.projection(pixel_values).flatten(2).transpose(1, 2)


class HfViTEmbeddings(nn.Module):
    """An image as tokens: ResNet stem (hybrids), patches, class token, position embeddings."""

    def __init__(self, config: HfViTConfig):
        super().__init__()
        self.config = config
        self.stem = None
        map_channels = config.num_channels
        if config.model_type == HfViTHybridConfig.model_type:  # as remote code, the class can be there twice
            self.stem = ResNetStem(config.num_channels, config.stem_width, config.stem_depths, stem_numbers(config))
            map_channels = self.stem.out_channels
        self.patch_embeddings = HfViTPatchEmbeddings(config, map_channels)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if config.use_cls_token else None
        self.position_embeddings = None
        if config.adds_positions_to_input and config.position_embedding_type == "learned":
            self.position_embeddings = nn.Parameter(self._empty_positions(config.grid_size))
        elif config.adds_positions_to_input and config.position_embedding_type == "learned2d":
            self.position_embeddings = build_tables(config, count=1)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self._tables: dict[tuple, torch.Tensor] = {}

    def forward(self, pixel_values: torch.Tensor, spatial_shapes: torch.Tensor | None = None) -> torch.Tensor:
        """Images, or images of several shapes as patches, to tokens.

        Args:
            pixel_values: (batch, num_channels, height, width); with `spatial_shapes` (batch, patches, values), see
                `HfViTImageProcessor` with the preset "native".
            spatial_shapes: (batch, 2), rows and columns of patches of each image.

        Returns:
            (batch, tokens, hidden_size)
        """
        if spatial_shapes is not None:
            refuse_several_shapes(self.config)
            return self.as_tokens(*self.as_padded_patches(pixel_values, spatial_shapes))
        patches = self.as_patches(pixel_values)
        return self.as_tokens(patches, self.positions_on(self.config.grid_of(*pixel_values.shape[-2:]), patches))

    def as_patches(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, num_channels, height, width) -> (batch, rows * columns, hidden_size)"""
        if pixel_values.ndim != 4 or pixel_values.shape[1] != self.config.num_channels:
            raise ValueError(
                f"pixel_values has shape {tuple(pixel_values.shape)}; "
                f"expected (batch, {self.config.num_channels}, height, width)"
            )
        self.config.grid_of(*pixel_values.shape[-2:])  # refuses a size that the patches do not divide
        return self.patch_embeddings(pixel_values if self.stem is None else self.stem(pixel_values))

    def as_padded_patches(
        self, pixel_values: torch.Tensor, spatial_shapes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(batch, patches, values) -> (batch, patches, hidden_size) and positions, zero where there is no patch

        Images of the same shape are put together again and embedded in one go, which gives a stem its neighbours.
        """
        height, width = (size * self.config.stride for size in as_pair(self.config.patch_size))
        batch, length, values = pixel_values.shape
        if values != height * width * self.config.num_channels:
            raise ValueError(
                f"pixel_values has {values} values per patch; patches of {height} x {width} pixels with "
                f"{self.config.num_channels} channels have {height * width * self.config.num_channels}"
            )
        patches = pixel_values.new_zeros(batch, length, self.config.hidden_size)
        positions = pixel_values.new_zeros(batch, self.config.num_prefix_tokens + length, self.config.hidden_size)
        shapes, group_of = spatial_shapes.unique(dim=0, return_inverse=True)
        for group, (rows, columns) in enumerate(shapes.tolist()):
            members = (group_of == group).nonzero()[:, 0]
            images = unpatchify(pixel_values[members, : rows * columns], (rows, columns), (height, width))
            patches[members, : rows * columns] = self.as_patches(images)
            table = self.positions_on((rows, columns), patches)
            if table is not None:
                positions[members, : table.shape[1]] = table
        return patches, positions if self.config.adds_positions_to_input else None

    def as_tokens(self, patches: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """(batch, patches, hidden_size) -> (batch, tokens, hidden_size): class token and positions added"""
        if self.cls_token is not None:
            patches = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        return self.dropout(patches if positions is None else patches + positions)

    def positions_on(self, grid: Grid, like: torch.Tensor) -> torch.Tensor | None:
        """Position embeddings on any grid of patches, resampled where it is not the stored one.

        Returns:
            (1, tokens, hidden_size), in the dtype and on the device of `like`; None for a model that adds none here.
        """
        if not self.config.adds_positions_to_input:
            return None
        if isinstance(self.position_embeddings, PositionTables):
            return self.position_embeddings(grid)
        if self.position_embeddings is not None and is_same(grid, self.config.grid_size):
            return self.position_embeddings
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._make_positions(grid, like)
        stored = self.position_embeddings
        version = None if stored is None or stored.is_inference() else (stored.data_ptr(), stored._version)
        key = (grid, like.dtype, like.device, version)
        if key not in self._tables:
            if len(self._tables) == CACHED_GRIDS:
                self._tables.clear()
            self._tables[key] = self._make_positions(grid, like)
        return self._tables[key]

    def _make_positions(self, grid: Grid, like: torch.Tensor) -> torch.Tensor:
        if self.position_embeddings is not None:
            return self.resampled(grid)
        table = sincos2d(grid, self.config.hidden_size).to(like)
        return F.pad(table, (0, 0, self.config.num_prefix_tokens, 0))  # zeros for the class token

    def resampled(self, grid: Grid) -> torch.Tensor:
        """The learned table on another grid, (1, tokens, hidden_size)."""
        config = self.config
        return resize_position_embeddings(
            self.position_embeddings, config.grid_size, grid, config.num_prefix_tokens, config.position_interpolation
        )

    def _empty_positions(self, grid: Grid) -> torch.Tensor:
        return torch.zeros(1, self.config.num_prefix_tokens + grid[0] * grid[1], self.config.hidden_size)


def refuse_several_shapes(config: HfViTConfig) -> None:
    """Raise ValueError where positions are not only those of tokens, before any image has a shape of its own."""
    if config.needs_one_grid:
        raise ValueError(
            "images of several shapes in a batch need position embeddings at the input and attention over all tokens, "
            f"not position_embedding_type {config.position_embedding_type!r} with position_embedding_placement "
            f"{config.position_embedding_placement!r} and attention_axes {config.attention_axes!r}"
        )


def unpatchify(patches: torch.Tensor, grid: Grid, patch_size: tuple[int, int]) -> torch.Tensor:
    """(batch, rows * columns, patch height * patch width * channels) -> (batch, channels, height, width)"""
    images = patches.unflatten(2, (*patch_size, -1)).unflatten(1, grid)  # (batch, rows, columns, *patch_size, channels)
    return images.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


class HfViTMLP(nn.Module):
    def __init__(self, config: HfViTConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.hidden_act = config.hidden_act
        self.activation = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.fc1.role = self.fc2.role = "mlp"

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
        self.dense = None if width is None else nn.Linear(config.hidden_size, width)
        if self.dense is not None:
            self.dense.role = "pre_logits"

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


class HfViTPreTrainedModel(PreTrainedModel):
    config: HfViTConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _no_split_modules = ["HfViTEmbeddings", "HfViTLayer"]  # noqa: RUF012 - transformers declares the type
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": HfViTLayer, "attentions": HfViTAttention}  # noqa: RUF012
    _input_embed_layer = "patch_embeddings"
    # A checkpoint with a head or a pooler may be loaded without: that loses nothing in silence, it is asked for.
    _keys_to_ignore_on_load_unexpected = [r"^classifier\.", r"^pooler\.", *MASKED_PATCH_KEYS]  # noqa: RUF012

    # What may be missing from a checkpoint, or be of another shape: it is made anew, and said so.
    _new_when_missing: tuple[str, ...] = ("classifier.",)
    _new_in_words = "The classification head of {name} does not fit; it was re-created as zeros: train it."

    conversion_record: dict[str, Any] | None = None  # what the weights were converted from

    def __init__(self, config: HfViTConfig, *args, **kwargs):
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, config=None, **kwargs):
        """Load a model; nothing in it is random.

        Folders of transformers' own `vit`, `vit_mae` and (of version 4) `vit-hybrid` load too, with their numbers.

        `image_size=` other than the stored one resamples the position embeddings, once. A head that is missing, or of
        another number of labels, is re-created as zeros, and said so.

        Raises:
            ValueError: anything else is missing, left over or of another shape.
        """
        hub = {name: kwargs[name] for name in ("cache_dir", "local_files_only", "revision", "subfolder", "token")
               if name in kwargs}  # fmt: skip
        if pretrained_model_name_or_path is None:  # the weights come as `state_dict=`
            settings, stored_size = {}, config.image_size
        else:
            settings, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **hub)
            stored_size = cls.config_class.from_pretrained(pretrained_model_name_or_path, **hub).image_size
        upstream_names = cls.upstream_names(settings)
        if upstream_names:
            kwargs["key_mapping"] = {**upstream_names, **kwargs.get("key_mapping", {})}
        image_size = kwargs.pop("image_size", stored_size if config is None else config.image_size)
        if config is not None:
            config = copy.deepcopy(config)
            config.image_size = stored_size
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("ignore_mismatched_sizes", True)
        model, info = super().from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            pretrained_model_name_or_path, *model_args, config=config, output_loading_info=True, **kwargs
        )
        if upstream_names:
            _settle_upstream(model, info)
        _check_loading(cls, info, pretrained_model_name_or_path or "the state_dict")
        if as_pair(image_size) != as_pair(stored_size):
            model.set_image_size(image_size)
        return (model, info) if wants_info else model

    @classmethod
    def upstream_names(cls, settings: dict[str, Any]) -> dict[str, str]:
        """Names in the files of transformers' own model -> ours; empty where a config.json is not one of its."""
        return WEIGHT_NAMES if is_upstream(settings) else {}

    def save_pretrained(self, save_directory, push_to_hub=False, **kwargs):
        """As in transformers; writes `conversion.json` too, if the model was converted."""
        hub_options = {name: kwargs.pop(name) for name in HUB_OPTIONS if push_to_hub and name in kwargs}
        super().save_pretrained(save_directory, **kwargs)
        self._save_record(save_directory)
        if push_to_hub:
            repo_id = hub_options.pop("repo_id", Path(save_directory).resolve().name)
            self.push_to_hub(repo_id, token=kwargs.get("token"), **hub_options)

    def save_description(self, save_directory) -> None:
        """What `save_pretrained` writes besides the weights."""
        self.config.architectures = [type(self).__name__]
        self.config.dtype = self.dtype
        self.config.save_pretrained(save_directory)
        self._save_record(save_directory)

    def _save_record(self, save_directory) -> None:
        if self.conversion_record is not None:
            text = json.dumps(self.conversion_record, indent=2)
            (Path(save_directory) / CONVERSION_RECORD).write_text(text + "\n")

    @torch.no_grad()
    def set_image_size(self, image_size: Size) -> None:
        """Resample the position embeddings to another image size, an int or (height, width) in pixels, for good."""
        config, new_grid = self.config, self.config.grid_of(*as_pair(image_size))
        embeddings: Any = self.base_model.embeddings
        if isinstance(embeddings.position_embeddings, nn.Parameter):
            embeddings.position_embeddings = nn.Parameter(embeddings.resampled(new_grid))
        for module in self.modules():
            if isinstance(module, PositionTables):
                module.resample(new_grid)
        config.image_size_history = [*(config.image_size_history or []), config.image_size]
        config.image_size = image_size

    def optimize_for_inference(self, batch_size: int = 1):
        """Compute the same faster, where gradients are not wanted; see `hf_vit.inference`.

        Takes as much memory again as the weights. Call it once the model has its weights, dtype and device. It may be
        called again; `train()` takes it back; saving, compiling and exporting do not see it.

        Args:
            batch_size: images at a time, as they will usually come.

        Returns:
            the model itself, in evaluation mode.
        """
        optimize(self, rows=batch_size * self.tokens_per_image)
        return self.eval()

    @property
    def tokens_per_image(self) -> int:
        rows, columns = self.config.grid_size
        return self.config.num_prefix_tokens + rows * columns

    def train(self, mode: bool = True):
        if mode:
            restore(self)
        return super().train(mode)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        """The original's initialisation (vit_jax/models_vit.py, models_resnet.py; flax's defaults elsewhere).

        transformers initialises only modules that own parameters, so that each says for itself what it is.
        """
        super()._init_weights(module)
        if isinstance(module, HfViTEmbeddings):
            if isinstance(module.position_embeddings, nn.Parameter):
                init.normal_(module.position_embeddings, std=self.config.initializer_range)
            if module.cls_token is not None:
                init.zeros_(module.cls_token)
        elif isinstance(module, PositionTables):
            for table in module.parameters():
                init.normal_(table, std=self.config.initializer_range)
        elif isinstance(module, HfViTMapPooling):
            init.xavier_uniform_(module.probe)
        elif isinstance(module, nn.Conv2d):
            _lecun_normal_(module.weight)
        elif isinstance(module, nn.GroupNorm) and getattr(module, "role", None) == "last":
            init.zeros_(module.weight)  # a new residual unit passes its input on
        elif isinstance(module, nn.Linear):
            _init_linear(module, getattr(module, "role", "projection"))


def _init_linear(linear: nn.Linear, role: str) -> None:
    """`role` is what the model calls the layer: "projection", "mlp", "pre_logits" or "head"."""
    if role == "head":
        init.zeros_(linear.weight)
    elif role == "pre_logits":
        _lecun_normal_(linear.weight)
    else:
        init.xavier_uniform_(linear.weight)
    if role == "mlp":
        init.normal_(linear.bias, std=1e-6)


def _lecun_normal_(weight: torch.Tensor) -> None:
    std = 1 / math.sqrt(weight[0].numel()) / TRUNCATED_STD
    init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def _settle_upstream(model: HfViTPreTrainedModel, info: dict) -> None:
    """What only the weights of one of transformers' ViTs say, and the names in which the model is saved again."""
    pooler = getattr(model.base_model, "pooler", None)
    missing = {key for key in info["missing_keys"] if key.removeprefix("vit.").startswith("pooler.dense.")}
    if pooler is not None and missing:  # its config.json does not say whether it has a pooler
        pooler.dense = None
        model.config.representation_size = None
        info["missing_keys"] = set(info["missing_keys"]) - missing
    conversions = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [change for change in conversions if not isinstance(change, WeightRenaming)]


def _check_loading(model_class: type[HfViTPreTrainedModel], info: dict, name: str) -> None:
    """Only the head may differ from the checkpoint."""
    may_be_new = model_class._new_when_missing
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(may_be_new))
    mismatched = [entry for entry in info["mismatched_keys"] if not entry[0].startswith(may_be_new)]
    unexpected = sorted(key for key in info["unexpected_keys"] if not re.search(REBUILDS_PIXELS, key))
    if missing or mismatched or unexpected:
        problems = [f"{key} is missing" for key in missing]
        problems += [f"{key} has shape {tuple(theirs)}, not {tuple(ours)}" for key, theirs, ours in mismatched]
        problems += [f"{key} is not used" for key in unexpected]
        raise ValueError(f"{name} does not fit its configuration: {'; '.join(problems)}")
    if info["missing_keys"] or info["mismatched_keys"]:
        logger.warning(model_class._new_in_words.format(name=name))


class HfViTModel(HfViTPreTrainedModel):
    """The encoder without a head.

    Args:
        add_pooling_layer: whether to compute `pooler_output`, the vector that a head sees.
    """

    def __init__(self, config: HfViTConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = HfViTEmbeddings(config)
        self.layer_position_embeddings = build_layer_tables(config)
        self.layers = nn.ModuleList(HfViTLayer(config, index) for index in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler = HfViTPooler(config) if add_pooling_layer else None
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        pixel_attention_mask: torch.Tensor | None = None,
        spatial_shapes: torch.Tensor | None = None,
        only_pooled: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Run the encoder.

        Args:
            pixel_values: (batch, num_channels, height, width), of any size that the patches divide, in [-1, 1]; or
                images of several shapes as patches, (batch, patches, values), with the next two.
            pixel_attention_mask: (batch, patches), 1 for the patches that are not padding.
            spatial_shapes: (batch, 2), rows and columns of patches of each image.
            attention_mask: (batch, tokens), 1 for the tokens that count; None when all do.
            interpolate_pos_encoding: accepted for compatibility; position embeddings always follow the image.
            only_pooled: of `last_hidden_state` and in the last layer, compute no more than `pooler_output` needs.

        Returns:
            `last_hidden_state` (batch, tokens, hidden_size) after the final LayerNorm; `pooler_output`
            (batch, representation_size or hidden_size), or (batch, tokens, ...) with pooling "none";
            `hidden_states`: before the first and after every layer; `attentions`:
            (batch, heads, tokens, tokens) per layer, with any attention implementation.
        """
        pixel_values = pixel_values.to(self.embeddings.patch_embeddings.projection.weight.dtype)
        hidden_states = self.embeddings(pixel_values, spatial_shapes)
        if pixel_attention_mask is not None:
            attention_mask = F.pad(pixel_attention_mask, (self.config.num_prefix_tokens, 0), value=1)
        shows_all = any(kwargs.get(name, getattr(self.config, name)) for name in RECORDS)
        first_is_enough = only_pooled and self.config.pooling == "cls" and attention_mask is None and not shows_all
        grid = None if spatial_shapes is not None else self.config.grid_of(*pixel_values.shape[-2:])
        hidden_states = _encode(self, hidden_states, grid, attention_mask, 1 if first_is_enough else None, **kwargs)
        norm_before, norm_after = (None, self.layernorm) if self.config.norm_after_pooling else (self.layernorm, None)
        last_hidden_state = hidden_states if norm_before is None else norm_before(hidden_states)
        pooler_output = None if self.pooler is None else self.pooler(last_hidden_state, attention_mask, norm_after)
        return BaseModelOutputWithPooling(last_hidden_state=last_hidden_state, pooler_output=pooler_output)


def _encode(
    model,
    hidden_states: torch.Tensor,
    grid: Grid | None,
    attention_mask: torch.Tensor | None = None,
    num_queries: int | None = None,
    **kwargs,
) -> torch.Tensor:
    """The stack of layers: (batch, tokens, hidden_size) -> the same, of all tokens or of the first `num_queries`."""
    kwargs["output_attentions"] = kwargs.get("output_attentions", model.config.output_attentions)
    if attention_mask is not None and kwargs["output_attentions"]:
        attention_mask = attention_mask[:, None, None, :].bool()
    elif attention_mask is not None:
        attention_mask = create_bidirectional_mask(
            config=model.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
    positions = positions_of_layers(model, grid)
    for layer, position in zip(model.layers[:-1], positions, strict=False):
        hidden_states = layer(hidden_states, attention_mask, None, position, grid=grid, **kwargs)
    return model.layers[-1](hidden_states, attention_mask, num_queries, positions[-1], grid=grid, **kwargs)


class HfViTForImageClassification(HfViTPreTrainedModel):
    """The encoder with a linear head; a new head is zero, as in the paper."""

    _keys_to_ignore_on_load_unexpected = MASKED_PATCH_KEYS

    def __init__(self, config: HfViTConfig):
        super().__init__(config)
        self.vit = HfViTModel(config)
        self.classifier = nn.Linear(config.representation_size or config.hidden_size, config.num_labels)
        self.classifier.role = "head"
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Classify; arguments as in `HfViTModel.forward`.

        Args:
            labels: (batch,) class indices, or (batch, num_labels) for several labels or regression.

        Returns:
            `logits` (batch, num_labels), or (batch, tokens, num_labels) with pooling "none"; `loss` with labels.
        """
        outputs = self.vit(pixel_values, attention_mask=attention_mask, only_pooled=True, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class HfViTBackbone(BackboneMixin, HfViTPreTrainedModel):
    """Feature maps of any layer, after the final LayerNorm, for detection and segmentation."""

    def __init__(self, config: HfViTConfig):
        super().__init__(config)
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.embeddings = HfViTEmbeddings(config)
        self.layer_position_embeddings = build_layer_tables(config)
        self.layers = nn.ModuleList(HfViTLayer(config, index) for index in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> BackboneOutput:
        """
        Returns:
            `feature_maps`: (batch, hidden_size, rows, columns) for every name in `out_features`.
        """
        rows_and_columns = self.config.grid_of(*pixel_values.shape[-2:])
        hidden_states = self.embeddings(pixel_values)
        feature_maps = []
        positions = positions_of_layers(self, rows_and_columns)
        for name, layer, position in zip(self.stage_names, [None, *self.layers], [None, *positions], strict=True):
            if layer is not None:
                hidden_states = layer(hidden_states, None, None, position, grid=rows_and_columns, **kwargs)
            if name in self.out_features:
                patches = self.layernorm(hidden_states)[:, self.config.num_prefix_tokens :]
                feature_maps.append(patches.transpose(1, 2).unflatten(2, rows_and_columns))
        return BackboneOutput(feature_maps=tuple(feature_maps))


class HfViTHybridModel(HfViTModel):
    config: HfViTHybridConfig


class HfViTHybridForImageClassification(HfViTForImageClassification):
    config: HfViTHybridConfig


class HfViTHybridBackbone(HfViTBackbone):
    config: HfViTHybridConfig
