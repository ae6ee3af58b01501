"""Conversion of our model to transformers' own `vit` or `bit`, with its weights."""

from typing import Any

import transformers

from ...models.configuration_hf_bit import HfBiTConfig
from ...models.configuration_hf_vision import HfVisionConfig, as_pair
from ...models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction
from ...models.pretrained import HfVisionPreTrainedModel
from ..building import has_head
from .names import BIT_SETTINGS, VIT_SETTINGS

# Prefix of our names -> prefix of the names in transformers' BiT classes (in memory, not in files).
_BEGINNINGS = {
    "resnet.stages.": "encoder.stages.",
    "resnet.": "embedder.",
    "classifier.": "classifier.1.",
}


def their_model(model: HfVisionPreTrainedModel) -> transformers.PreTrainedModel:
    """Build the model of transformers that computes the same."""
    weights = model.state_dict()
    if isinstance(model.config, HfBiTConfig):
        theirs = _their_bit(model, model.config)
        weights = {_their_bit_name(name): array for name, array in weights.items()}
    elif isinstance(model, HfViTForMaskedPatchPrediction):
        theirs = transformers.ViTForMaskedImageModeling(_their_config(model, encoder_stride=model.config.patch_size))
        weights["vit.embeddings.mask_token"] = weights.pop("mask_token")
        weights["decoder.0.weight"] = weights.pop("predictor.weight")[:, :, None, None]
        weights["decoder.0.bias"] = weights.pop("predictor.bias")
    elif has_head(model):
        theirs = transformers.ViTForImageClassification(_their_config(model))
    else:
        size = model.config.representation_size
        theirs = transformers.ViTModel(
            _their_config(model, pooler_output_size=size), add_pooling_layer=size is not None
        )
    theirs.load_state_dict(weights, assign=True)
    return theirs


def _their_config(model: HfVisionPreTrainedModel, **settings: Any) -> transformers.ViTConfig:
    return transformers.ViTConfig(
        **{name: getattr(model.config, name) for name in VIT_SETTINGS},
        **settings,
        id2label=model.config.id2label,
        label2id=model.config.label2id,
        dtype=model.dtype,
    )


def _their_bit(model: HfVisionPreTrainedModel, config: HfBiTConfig) -> transformers.PreTrainedModel:
    """Build transformers' BiT; width_factor stays 1, because in transformers it widens only the stages."""
    is_same = config.padding == "same"
    return (transformers.BitForImageClassification if has_head(model) else transformers.BitModel)(
        transformers.BitConfig(
            **{name: getattr(config, name) for name in BIT_SETTINGS},
            hidden_sizes=config.hidden_sizes,
            global_padding="SAME" if is_same else None,
            embedding_dynamic_padding=is_same,
            id2label=config.id2label,
            label2id=config.label2id,
            dtype=model.dtype,
        )
    )


def _their_bit_name(name: str) -> str:
    prefix = "bit." if name.startswith("bit.") else ""
    own = name.removeprefix(prefix)
    beginning = next((ours for ours in _BEGINNINGS if own.startswith(ours)), "")
    return prefix + _BEGINNINGS.get(beginning, "") + own.removeprefix(beginning)


def their_processor(config: HfVisionConfig, processor: Any) -> transformers.ViTImageProcessorPil:
    """Build transformers' image processor, with the size, mean and deviation of an `HfViTImageProcessor`."""
    height, width = as_pair(config.image_size)
    return transformers.ViTImageProcessorPil(  # needs no torchvision; saved as ViTImageProcessor
        size={"height": height, "width": width},
        resample=2,
        rescale_factor=processor.rescale_factor,
        image_mean=processor.image_mean,
        image_std=processor.image_std,
    )
