"""The Vision Transformer and the hybrids: one encoder, with or without a ResNet stem.

Parameters have the names of transformers' ViT. In shapes, tokens are the class token, if there is one, and the patches,
row by row.
"""

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vision import Size, as_pair, check_size
from .configuration_hf_vit import HfViTConfig, HfViTHybridConfig, is_upstream
from .embeddings import HfViTEmbeddings, size_of
from .layers import HfViTAttention, HfViTLayer, HfViTPooler
from .position_embeddings import Grid, PositionTables, build_layer_tables
from .pretrained import HEAD_KEYS, HfVisionPreTrainedModel, HfViTHead

# Names in files of transformers -> ours, as regular expressions. transformers 5 writes the names of version 4.
_STEM = r"embeddings\.patch_embeddings\.backbone\.bit\."
WEIGHT_NAMES = {
    r"encoder\.layer\.(\d+)\.": r"layers.\1.",
    r"(layers\.\d+)\.attention\.attention\.query\.": r"\1.attention.q_proj.",
    r"(layers\.\d+)\.attention\.attention\.key\.": r"\1.attention.k_proj.",
    r"(layers\.\d+)\.attention\.attention\.value\.": r"\1.attention.v_proj.",
    r"(layers\.\d+)\.attention\.output\.dense\.": r"\1.attention.o_proj.",
    r"(layers\.\d+)\.intermediate\.dense\.": r"\1.mlp.fc1.",
    r"(layers\.\d+)\.output\.dense\.": r"\1.mlp.fc2.",
    _STEM + r"embedder\.": r"embeddings.stem.",
    _STEM + r"encoder\.stages\.": r"embeddings.stem.stages.",
}
# Parameters besides the encoder's: of masked patch prediction or a mask token, and of an image-text model.
_MASKED_PATCH_KEYS = [r"^mask_token$", r"^predictor\.", r"^(vit\.)?embeddings\.mask_token$"]
_PROJECTION_KEYS = [r"^(vit\.)?projection\."]
_RECORDS = ("output_hidden_states", "output_attentions")  # arguments that need all tokens of every layer


@dataclass
class HfViTModelOutput(BaseModelOutputWithPooling):
    """Output of `HfViTModel`: the fields of transformers' `BaseModelOutputWithPooling`, and `image_embeds`.

    image_embeds: projection of `pooler_output`, not normalised: (batch, projection_dim), or
        (batch, tokens, projection_dim) with pooling "none"; None for a model without projection.
    """

    image_embeds: torch.FloatTensor | None = None


class HfViTPreTrainedModel(HfVisionPreTrainedModel):
    """Base of the Vision Transformers and the hybrids."""

    config: HfViTConfig
    base_model_prefix = "vit"
    _no_split_modules = ["HfViTEmbeddings", "HfViTLayer"]  # noqa: RUF012 - transformers declares the type
    _can_record_outputs = {"hidden_states": HfViTLayer, "attentions": HfViTAttention}  # noqa: RUF012
    _input_embed_layer = "patch_embeddings"
    # Who loads the bare encoder of a checkpoint does not want these.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        HEAD_KEYS,
        r"^pooler\.",
        *_PROJECTION_KEYS,
        *_MASKED_PATCH_KEYS,
    ]
    _upstream_extras = r"^(vit\.)?embeddings\.mask_token$|^decoder\."  # the parts that reconstruct masked pixels

    @classmethod
    def upstream_names(cls, settings: dict[str, Any]) -> dict[str, str]:
        """See the base class."""
        return WEIGHT_NAMES if is_upstream(settings) else {}

    def _settle_upstream(self, info: dict[str, Any]) -> None:
        super()._settle_upstream(info)
        pooler: Any = getattr(self.base_model, "pooler", None)
        missing = {key for key in info["missing_keys"] if key.removeprefix("vit.").startswith("pooler.dense.")}
        if pooler is not None and missing:  # the config.json does not tell whether there is a pooler
            pooler.dense = None
            self.config.representation_size = None
            info["missing_keys"] = set(info["missing_keys"]) - missing

    def _take_image_size(self, image_size: Size) -> None:
        """Resample the position embeddings permanently; a flexible model keeps the stored ones."""
        self._set_sizes(self.config.patch_size, image_size)

    def set_patch_size(self, patch_size: Size, image_size: Size | None = None, processor_follows: bool = False) -> None:
        """Set another patch size.

        A flexible model changes only its configuration, any number of times without loss. In any other model, kernel
        and position embeddings are resized permanently; see `make_flexible`.

        Args:
            patch_size: an int or (height, width) in pixels; for a hybrid, in pixels of the stem's map.
            image_size: another image size, an int or (height, width) in pixels; None keeps it.
            processor_follows: as in `set_image_size`.

        Raises:
            ValueError: the patches do not divide the image size of a model that is not flexible; the message names
                the nearest sizes.
        """
        check_size("patch_size", patch_size)
        before, base = self.config.image_size, cast(HfVisionPreTrainedModel, self.base_model)
        self._set_sizes(patch_size, before if image_size is None else image_size)
        base._image_size_noted = False
        if not processor_follows:
            self._say_image_size(before)

    def make_flexible(self) -> None:
        """Keep kernel and position embeddings as stored from now on; each forward resizes them to the sizes in use.

        Positions with the default interpolation, "jax", are interpolated "bilinear" from now on, as in FlexiViT.
        """
        config = self.config
        if not config.is_flexible:
            if config.position_interpolation == "jax":
                config.position_interpolation = "bilinear"
            config.position_grid = config.grid_size
            config.stored_patch_size = config.patch_size

    def make_fixed(self) -> None:
        """Resize kernel and position embeddings of a flexible model permanently to the configured sizes."""
        config = self.config
        if config.is_flexible:
            grid = config.grid_of(*as_pair(config.image_size))  # raises if the patches do not divide it
            self._resize_weights(as_pair(config.patch_size), grid)
            config.stored_patch_size = config.position_grid = None

    def _set_sizes(self, patch_size: Size, image_size: Size) -> None:
        config, after = self.config, copy(self.config)
        check_size("image_size", image_size)
        after.patch_size, after.image_size = patch_size, image_size
        if config.is_flexible:
            config.position_grid = config.stored_grid  # before the sizes change, on which its default depends
        else:
            self._resize_weights(as_pair(patch_size), after.grid_size)
            if as_pair(image_size) != as_pair(config.image_size):
                config.image_size_history = [*(config.image_size_history or []), config.image_size]
        config.patch_size, config.image_size = patch_size, image_size

    @torch.no_grad()
    def _resize_weights(self, patch_size: tuple[int, int], grid: Grid) -> None:
        """Resize kernel and position embeddings permanently; the caller updates the configuration."""
        embeddings: Any = self.base_model.embeddings
        embeddings.resize(patch_size, grid)
        for module in self.modules():
            if isinstance(module, PositionTables):
                module.resample(grid)

    @property
    def tokens_per_image(self) -> int:
        """Number of tokens of an image of the model's size."""
        rows, columns = self.config.grid_size
        return self.config.num_prefix_tokens + rows * columns


class HfViTEncoder(HfViTPreTrainedModel):
    """Embeddings, layers and the final norm, the base of the model and the backbone.

    The loop over the layers is here and not in a subclass of `nn.ModuleList`, which accelerate's regional compilation
    would replace by a plain `nn.ModuleList`.
    """

    def __init__(self, config: HfViTConfig, use_mask_token: bool = False):
        super().__init__(config)
        self.embeddings = HfViTEmbeddings(config, use_mask_token)
        self.layer_position_embeddings = build_layer_tables(config)
        self.layers = nn.ModuleList(HfViTLayer(config, index) for index in range(config.num_hidden_layers))
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def post_init(self) -> None:
        """Finish the construction, as in transformers; without pooling, ignore that of a classifier's checkpoint."""
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
        keep: Collection[int] = (),
        **kwargs: Any,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the layers.

        Args:
            hidden_states: (batch, tokens, hidden_size)
            grid: (rows, columns) of patches, the same for all images; None if each image has its own.
            attention_mask: (batch, tokens), 1 for real tokens; None if there is no padding.
            num_queries: number of first tokens that the last layer computes; None for all.
            keep: indices of layers whose output to return too.

        Returns:
            (batch, tokens or num_queries, hidden_size), before the final LayerNorm; and a list of the same after each
            layer of `keep`.
        """
        kwargs["output_attentions"] = kwargs.get("output_attentions", self.config.output_attentions)
        if attention_mask is not None and kwargs["output_attentions"]:
            attention_mask = attention_mask[:, None, None, :].bool()
        elif attention_mask is not None:
            attention_mask = create_bidirectional_mask(
                config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
            )
        last, kept = len(self.layers) - 1, []
        for index, (layer, positions) in enumerate(zip(self.layers, self._positions_of_layers(grid), strict=True)):
            queries = num_queries if index == last else None
            hidden_states = layer(hidden_states, attention_mask, queries, positions, grid=grid, **kwargs)
            if index in keep:
                kept.append(hidden_states)
        return hidden_states, kept

    def _positions_of_layers(self, grid: Grid | None) -> Sequence[torch.Tensor | None]:
        """Return the positions that each layer adds to its input: (tokens, hidden_size), or None."""
        if self.layer_position_embeddings is None:
            return [None] * len(self.layers)
        return list(self.layer_position_embeddings(grid).expand(len(self.layers), -1, -1))


class HfViTModel(HfViTEncoder):
    """Vision Transformer without a head; with the projection of an image-text model if `projection_dim` is set.

    Args:
        add_pooling_layer: compute `pooler_output`, the input of a head or the projection.
        use_mask_token: add a mask token for `bool_masked_pos`; a new one is initialised with zeros.

    Example:
        >>> import torch
        >>> from hf_vit import HfViTConfig, HfViTModel
        >>> model = HfViTModel(HfViTConfig(num_hidden_layers=1, pooling="mean"))
        >>> model(torch.zeros(2, 3, 224, 320)).last_hidden_state.shape
        torch.Size([2, 280, 768])
    """

    _new_when_missing = ("embeddings.mask_token",)
    _new_in_words = "{name} has no mask token; a new one is initialised with zeros: train it."

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
        spatial_shapes: torch.Tensor | None = None,
        kept_patches: torch.Tensor | None = None,
        patch_size: Size | None = None,
        only_pooled: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> HfViTModelOutput:
        """Run the encoder.

        Args:
            pixel_values: (batch, num_channels, height, width), of any size that the patches divide, in [-1, 1]; or
                images of several shapes as patches, (batch, patches, values), with `pixel_attention_mask` and
                `spatial_shapes`.
            bool_masked_pos: (batch, patches), true for the patches that the mask token replaces; see `use_mask_token`.
            interpolate_pos_encoding: True suppresses the warning that images have another size than the model's. The
                position embeddings are resampled in any case.
            attention_mask: (batch, tokens), 1 for real tokens; None if there is no padding.
            pixel_attention_mask: (batch, patches), 1 for real patches; None: derived from `spatial_shapes`.
            spatial_shapes: (batch, 2), rows and columns of patches of each image.
            kept_patches: (batch, kept), indices of the patches that the layers get, -1 for padding; None: all.
            patch_size: patch size of this forward, for a flexible model, an int or (height, width); None: the
                configuration's.
            only_pooled: compute only the tokens of the last layer and of `last_hidden_state` that `pooler_output`
                needs.

        Returns:
            `last_hidden_state` (batch, tokens, hidden_size) after the final LayerNorm; `pooler_output`
            (batch, representation_size or hidden_size), or (batch, tokens, ...) with pooling "none";
            `image_embeds`, see `HfViTModelOutput`; `hidden_states`: (batch, tokens, hidden_size) before the first and
            after every layer; `attentions`: (batch, heads, tokens, tokens) per layer, with any attention
            implementation.
        """
        hidden_states = self.embeddings(pixel_values, spatial_shapes, patch_size, bool_masked_pos)
        self.note_image_size(pixel_values, interpolate_pos_encoding or spatial_shapes is not None)
        if spatial_shapes is not None and pixel_attention_mask is None:
            places = torch.arange(pixel_values.shape[1], device=pixel_values.device)
            pixel_attention_mask = (places < spatial_shapes.prod(dim=1, keepdim=True)).int()
        if kept_patches is not None:
            hidden_states, pixel_attention_mask = self.embeddings.keep(hidden_states, kept_patches)
        if pixel_attention_mask is not None:
            attention_mask = F.pad(pixel_attention_mask, (self.config.num_prefix_tokens, 0), value=1)
        shows_all = any(kwargs.get(name, getattr(self.config, name)) for name in _RECORDS)
        first_is_enough = only_pooled and self.config.pooling == "cls" and attention_mask is None and not shows_all
        grid = None if spatial_shapes is not None else self.config.grid_of(*size_of(pixel_values), patch_size)
        num_queries = 1 if first_is_enough else None
        hidden_states, _ = self.encode(hidden_states, grid, attention_mask, num_queries, **kwargs)
        norm_before, norm_after = (None, self.layernorm) if self.config.norm_after_pooling else (self.layernorm, None)
        last_hidden_state = hidden_states if norm_before is None else norm_before(hidden_states)
        pooler_output = None if self.pooler is None else self.pooler(last_hidden_state, attention_mask, norm_after)
        image_embeds = None if self.projection is None else self.projection(pooler_output)
        return HfViTModelOutput(
            last_hidden_state=last_hidden_state, pooler_output=pooler_output, image_embeds=image_embeds
        )


class HfViTForImageClassification(HfViTPreTrainedModel):
    """Vision Transformer with a linear head; a new head is initialised with zeros, as in the paper.

    The projection of an image-text model is not loaded.

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
        self.classifier = HfViTHead(config.representation_size or config.hidden_size, config.num_labels)
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
        """Classify images; other arguments as in `HfViTModel.forward`.

        Args:
            labels: (batch,) class indices, or (batch, num_labels) for several labels or regression.

        Returns:
            `logits` (batch, num_labels), or (batch, tokens, num_labels) with pooling "none"; `loss` if there are
            labels.
        """
        outputs = self.vit(
            pixel_values,
            attention_mask=attention_mask,
            interpolate_pos_encoding=interpolate_pos_encoding,
            patch_size=patch_size,
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
    """Feature maps of any layer, after the final LayerNorm, for detection and segmentation.

    Example:
        >>> import torch
        >>> from hf_vit import HfViTBackbone, HfViTConfig
        >>> backbone = HfViTBackbone(HfViTConfig(num_hidden_layers=2, out_features=["stage1", "stage2"]))
        >>> [one.shape for one in backbone(torch.zeros(1, 3, 224, 320)).feature_maps]
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
        """Compute feature maps; arguments as in `HfViTModel.forward`.

        Returns:
            `feature_maps`: (batch, hidden_size, rows, columns) for every name in `out_features`.
        """
        grid = self.config.grid_of(*size_of(pixel_values), patch_size=patch_size)
        tokens = self.embeddings(pixel_values, patch_size=patch_size)
        stages = [index for index, name in enumerate(self.stage_names) if name in self.out_features]  # 0: "stem"
        _, maps = self.encode(tokens, grid, keep=[stage - 1 for stage in stages], **kwargs)
        maps = [tokens, *maps] if 0 in stages else maps
        patches = (self.layernorm(states)[:, self.config.num_prefix_tokens :] for states in maps)
        # transformers declares a tuple of one
        feature_maps: Any = tuple(one.transpose(1, 2).unflatten(2, grid) for one in patches)
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
