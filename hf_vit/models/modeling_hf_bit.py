"""BiT ResNets: encoder, classifier and backbone on top of `ResNetStem`.

Feature maps are (batch, channels, rows, columns). Loading, saving and initialization are in pretrained.py.
"""

from typing import Any, Unpack

import torch
from torch import nn
from torch.nn.functional import relu
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPoolingAndNoAttention,
    ImageClassifierOutputWithNoAttention,
)
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .axial_attention import replace_convolutions
from .configuration_hf_bit import HfBiTConfig
from .packed_linear import OptimizeForInference
from .pretrained import HEAD_KEYS, HfVisionPreTrainedModel, HfViTHead
from .resnet_stem import GroupNorm, ResNetStage, ResNetStem
from .sizes import Size, as_pair


def _build_resnet(config: HfBiTConfig) -> ResNetStem:
    """Build the root convolution and the stages."""
    resnet = ResNetStem(config, config.embedding_size, config.depths)
    if config.spatial_mixing == "axial_attention":
        replace_convolutions(resnet, config)
    return resnet


class HfBiTPreTrainedModel(OptimizeForInference, HfVisionPreTrainedModel):
    """Base class of the ResNets. `attn_implementation` has no effect on them."""

    config: HfBiTConfig
    base_model_prefix = "bit"
    _no_split_modules = ["BottleneckUnit", "PreActivationUnit"]  # noqa: RUF012 - transformers declares the type
    _can_record_outputs = {"hidden_states": ResNetStage}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [HEAD_KEYS]  # noqa: RUF012

    def get_input_embeddings(self) -> nn.Module:
        """Return the root convolution."""
        return self._resnet.convolution

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the root convolution."""
        self._resnet.convolution = value

    @property
    def _resnet(self) -> Any:
        return self.base_model.resnet

    def set_image_size(self, image_size: Size) -> None:
        """Set another image size, an int or (height, width) in pixels.

        Raises:
            ValueError: the model has axial attention, whose relative positions depend on the image size.
        """
        if self.config.spatial_mixing == "axial_attention" and as_pair(image_size) != as_pair(self.config.image_size):
            raise ValueError(f"cannot set image_size {image_size}: axial attention needs {self.config.image_size}")
        super().set_image_size(image_size)

    def _prepare_images(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Check the images and convert them to the weights' dtype."""
        self.check_images(pixel_values)
        return pixel_values.to(self.dtype)


class HfBiTModel(HfBiTPreTrainedModel):
    """BiT ResNet without a head."""

    def __init__(self, config: HfBiTConfig):
        super().__init__(config)
        self.resnet = _build_resnet(config)
        self.norm = None
        if config.layer_type == "preactivation":
            self.norm = GroupNorm(config.hidden_size, config)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPoolingAndNoAttention:
        """Run the network.

        Args:
            pixel_values: (batch, num_channels, height, width) in [-1, 1], of any size; with axial attention, of at most
                `image_size`.

        Returns:
            `last_hidden_state`: (batch, hidden_size, rows, columns), after the last ReLU.
            `pooler_output`: (batch, hidden_size), the mean of `last_hidden_state` over rows and columns.
            `hidden_states`: (batch, channels, rows, columns), the input of the first stage and the output of each.
        """
        self.check_forward_arguments(kwargs)
        feature_map = self.resnet(self._prepare_images(pixel_values))
        self.warn_about_image_size(pixel_values, kwargs.get("interpolate_pos_encoding"))  # pyright: ignore - the same argument as in HfViTModel
        if self.norm is not None:
            feature_map = relu(self.norm(feature_map))
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=feature_map, pooler_output=feature_map.mean(dim=(2, 3))
        )


class HfBiTForImageClassification(HfBiTPreTrainedModel):
    """BiT ResNet with a linear classification head, which is new as `head_init` says."""

    _keys_to_ignore_on_load_unexpected = []  # noqa: RUF012

    def __init__(self, config: HfBiTConfig):
        super().__init__(config)
        self.bit = HfBiTModel(config)
        self.classifier = HfViTHead(config.hidden_size, config.num_labels, config.initial_head_std)
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> ImageClassifierOutputWithNoAttention:
        """Classify images; the other arguments are those of `HfBiTModel.forward`.

        Args:
            labels: (batch,) class indices; or (batch, num_labels) for multi-label classification or regression.

        Returns:
            `logits`: (batch, num_labels).
            `loss`: a scalar, if `labels` is given.
        """
        outputs = self.bit(pixel_values, return_dict=True, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits, hidden_states=outputs.hidden_states)


class HfBiTBackbone(BackboneMixin, HfBiTPreTrainedModel):
    """Feature maps of the root and the stages for detection and segmentation.

    With pre-activation units, the feature maps are not normalized; the norm before the head is not applied.
    """

    has_attentions = False
    _keys_to_ignore_on_load_unexpected = [HEAD_KEYS, r"^(bit\.)?norm\."]  # noqa: RUF012

    def __init__(self, config: HfBiTConfig):
        super().__init__(config)
        self.num_features = [config.embedding_size, *config.hidden_sizes]
        self.resnet = _build_resnet(config)
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    @capture_outputs(tie_last_hidden_states=False)
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> BackboneOutput:
        """Compute feature maps; the arguments are those of `HfBiTModel.forward`.

        Returns:
            `feature_maps`: (batch, channels, rows, columns) for each name in `out_features`.
        """
        self.check_forward_arguments(kwargs)
        feature_map = self.resnet.root(self._prepare_images(pixel_values))
        maps = [feature_map]
        for stage in self.resnet.stages:
            maps.append(feature_map := stage(feature_map))
        selected = [stage for name, stage in zip(self.stage_names, maps, strict=True) if name in self.out_features]
        feature_maps: Any = tuple(selected)  # `Any`, because transformers declares a tuple of one tensor
        return BackboneOutput(feature_maps=feature_maps)
