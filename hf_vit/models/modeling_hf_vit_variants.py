"""The Vision Transformers beyond the plain one, as subclasses that add to it what a configuration or a call asks for.

These are the classes that `hf_vit` exports. A plain ViT computes the same in both; its code on the Hub is that of
modeling_hf_vit.py alone. What they add:

| what | chosen by | file |
| --- | --- | --- |
| a ResNet stem (the hybrids) | `HfViTHybridConfig` | resnet_stem.py |
| other patch sizes (FlexiViT) | `stored_patch_size`, or the argument `patch_size` | flexible_sizes.py |
| batches of mixed sizes (NaFlex), dropped patches | the arguments `spatial_shapes`, `keep` | flexible_sizes.py |
| 2-D, relative and per-layer positions, axial attention | `position_embedding_type`, ... | ablations.py |
| frozen copies with packed weights | `optimize_for_inference` | packed_linear.py |
"""

from typing import Any, Unpack

import torch
from torch import nn
from torch.nn import functional as F
from transformers.backbone_utils import filter_output_hidden_states
from transformers.modeling_outputs import BackboneOutput
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .ablations import PositionTables, build_layer, build_layer_tables, build_tables
from .configuration_hf_vit import HfViTHybridConfig
from .flexible_sizes import FlexibleSizes, HfViTPatchEmbeddings, embed_mixed_sizes, keep_patches, patch_mask
from .modeling_hf_vit import HfViTBackbone as PlainBackbone
from .modeling_hf_vit import HfViTEmbeddings as PlainEmbeddings
from .modeling_hf_vit import HfViTEncoder, HfViTModelOutput, HfViTPreTrainedModel
from .modeling_hf_vit import HfViTForImageClassification as PlainForImageClassification
from .modeling_hf_vit import HfViTModel as PlainModel
from .packed_linear import OptimizeForInference
from .resnet_stem import ResNetStem
from .sizes import Grid, Size


class HfViTEmbeddings(PlainEmbeddings):
    """Input tokens of the encoder, with patches of any size; a hybrid embeds patches of the stem's feature map."""

    def build_patch_embeddings(self) -> HfViTPatchEmbeddings:
        config: Any = self.config
        self.stem = None
        # not isinstance, because remote code has its own copy of the class
        if config.model_type != HfViTHybridConfig.model_type:
            return HfViTPatchEmbeddings(config, config.num_channels)
        self.stem = ResNetStem(config, config.stem_width, config.stem_depths)
        return HfViTPatchEmbeddings(config, self.stem.out_channels)

    def build_position_embeddings(self) -> nn.Module | nn.Parameter | None:
        config = self.config
        if config.adds_positions_to_input and config.position_embedding_type == "learned2d":
            return build_tables(config, count=1)
        return super().build_position_embeddings()

    def forward(
        self,
        pixel_values: torch.Tensor,
        grid: Grid | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        spatial_shapes: torch.Tensor | list[list[int]] | None = None,
        patch_size: Size | None = None,
    ) -> torch.Tensor:
        """Embed images, to (batch, tokens, hidden_size); the arguments are those of `HfViTModel.forward`.

        Args:
            grid: (rows, columns) of patches; None: computed from `pixel_values`. Unused with `spatial_shapes`.
        """
        if spatial_shapes is not None:
            patch_size = self.config.resolve_patch_size(patch_size)
            patches, positions = embed_mixed_sizes(self, pixel_values, spatial_shapes, patch_size)
        else:
            if grid is None:
                height, width = pixel_values.shape[-2:]
                grid = self.config.grid_of(height, width, patch_size)
            patches = self.embed_patches(pixel_values, patch_size)
            positions = self.position_embeddings_for(grid, patches)
        return self.add_positions(self.mask_patches(patches, bool_masked_pos), positions)

    def embed_patches(self, pixel_values: torch.Tensor, patch_size: Size | None = None) -> torch.Tensor:
        """(batch, num_channels, height, width) -> (batch, rows * columns, hidden_size), in the weights' dtype"""
        feature_map = pixel_values.to(self.patch_embeddings.projection.weight.dtype)
        if self.stem is not None:
            feature_map = self.stem(feature_map)
        return self.patch_embeddings(feature_map, self.config.resolve_patch_size(patch_size))

    def position_embeddings_for(self, grid: Grid, like: torch.Tensor) -> torch.Tensor | None:
        if isinstance(self.position_embeddings, PositionTables):
            return self.position_embeddings(grid)
        return super().position_embeddings_for(grid, like)


class HfViTVariant(OptimizeForInference, FlexibleSizes, HfViTPreTrainedModel):
    """Base class of the Vision Transformers and the hybrids, for every configuration."""

    def grid_of(self, pixel_values: torch.Tensor, patch_size: Size | None = None) -> Grid:
        """Return the (rows, columns) of patches of images (batch, num_channels, height, width)."""
        return self.config.grid_of(*self.check_images(pixel_values), patch_size)


class HfViTVariantEncoder(HfViTVariant, HfViTEncoder):
    """Embeddings and layers for every configuration."""

    def build_embeddings(self, use_mask_token: bool) -> HfViTEmbeddings:
        return HfViTEmbeddings(self.config, use_mask_token)

    def build_layers(self) -> nn.ModuleList:
        self.layer_position_embeddings = build_layer_tables(self.config)
        return nn.ModuleList(build_layer(self.config, index) for index in range(self.config.num_hidden_layers))

    def layer_arguments(self, grid: Grid | None) -> dict[str, Any]:
        """Return what `encode` must pass to the layers of an ablation.

        Args:
            grid: (rows, columns) of patches, the same for all images; None if the images have different grids.
        """
        arguments: dict[str, Any] = {}
        if self.config.position_embedding_type == "relative" or self.config.attention_axes == "axial":
            arguments["grid"] = grid
        if self.layer_position_embeddings is not None:
            arguments["tables"] = self.layer_position_embeddings(grid).expand(len(self.layers), -1, -1)
        return arguments


class HfViTModel(HfViTVariantEncoder, PlainModel):
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
        """Run the encoder; arguments and results that are not listed are those of a plain ViT.

        Args:
            pixel_values: (batch, num_channels, height, width) in [-1, 1]. With `spatial_shapes`, images of different
                sizes as patches, (batch, patches, patch height * patch width * num_channels).
            pixel_attention_mask: (batch, patches), 1 for real patches and 0 for padding; None: derived from
                `spatial_shapes`.
            spatial_shapes: (batch, 2), rows and columns of patches of each image. A list or a CPU tensor avoids a
                synchronization with the device.
            keep: (batch, kept), indices of the patches to process, row by row, -1 for padding; the others are dropped
                after their positions were added, and the class token stays. None: all patches.
            patch_size: patch size for this forward pass of a flexible model, an int or (height, width); None: that of
                the configuration.
        """
        self.check_forward_arguments(kwargs)
        grid = None
        if spatial_shapes is None:
            grid = self.grid_of(pixel_values, patch_size)
            self.warn_about_image_size(pixel_values, interpolate_pos_encoding)
        elif pixel_attention_mask is None:
            pixel_attention_mask = patch_mask(spatial_shapes, pixel_values)
        hidden_states = self.embeddings(pixel_values, grid, bool_masked_pos, spatial_shapes, patch_size)
        if keep is not None:
            hidden_states, pixel_attention_mask = keep_patches(hidden_states, keep, self.config)
        if pixel_attention_mask is not None:
            attention_mask = F.pad(pixel_attention_mask, (self.config.num_prefix_tokens, 0), value=1)
        for_layers = self.layer_arguments(grid)
        return self.encode_and_pool(hidden_states, attention_mask, only_pooled, **for_layers, **kwargs)


class HfViTForImageClassification(HfViTVariant, PlainForImageClassification):
    """Vision Transformer with a linear classification head, which is new as `head_init` says.

    An image-text model's projection is ignored. `forward` takes the arguments of `HfViTModel.forward`, too.

    Example:
        >>> from hf_vit import HfViTForImageClassification
        >>> model = HfViTForImageClassification.from_pretrained("folder", image_size=384)
        >>> model.config.grid_size
        (24, 24)
    """

    encoder_class = HfViTModel


class HfViTBackbone(HfViTVariantEncoder, PlainBackbone):
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

    @can_return_tuple
    @filter_output_hidden_states
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor, *, patch_size: Size | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> BackboneOutput:
        """Compute feature maps as a plain ViT, for any `patch_size` of a flexible model."""
        self.check_forward_arguments(kwargs)
        grid = self.grid_of(pixel_values, patch_size)
        tokens = self.embeddings(pixel_values, grid, patch_size=patch_size)
        return self.encode_to_maps(tokens, grid, **self.layer_arguments(grid), **kwargs)


class HfViTHybridModel(HfViTModel):
    """Hybrid (ResNet stem and Vision Transformer) without a head; see `HfViTModel`."""

    config: HfViTHybridConfig


class HfViTHybridForImageClassification(HfViTForImageClassification):
    """Hybrid (ResNet stem and Vision Transformer) with a linear head; see `HfViTForImageClassification`."""

    config: HfViTHybridConfig


class HfViTHybridBackbone(HfViTBackbone):
    """Feature maps of a hybrid (ResNet stem and Vision Transformer); see `HfViTBackbone`."""

    config: HfViTHybridConfig
