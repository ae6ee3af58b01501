"""The Vision Transformer and its hybrids: one encoder, with or without a ResNet in front.

Parameter names are those of transformers' ViT, so that weights move between the two by config alone. Shapes: tokens are
the class token, if there is one, and the patches, row by row.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.processing_utils import Unpack
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from .embeddings import HfViTEmbeddings
from .layers import HfViTLayer, HfViTPooler
from .position_embeddings import Grid
from .position_tables import build_layer_tables, positions_of_layers
from .pretrained import MASKED_PATCH_KEYS, HfViTPreTrainedModel

RECORDS = ("output_hidden_states", "output_attentions")  # what shows more than the result


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
