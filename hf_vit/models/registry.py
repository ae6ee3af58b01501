"""All classes and architectures of the family, and their registration with transformers' Auto classes on import."""

from typing import Any

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
)

from .configuration_hf_bit import VARIANTS as BIT_VARIANTS
from .configuration_hf_bit import HfBiTConfig
from .configuration_hf_vit import VARIANTS as VIT_VARIANTS
from .configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from .image_processing_hf_vit import HfViTImageProcessor
from .modeling_hf_bit import HfBiTBackbone, HfBiTForImageClassification, HfBiTModel
from .modeling_hf_vit_variants import (
    HfViTBackbone,
    HfViTForImageClassification,
    HfViTHybridBackbone,
    HfViTHybridForImageClassification,
    HfViTHybridModel,
    HfViTModel,
)
from .modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction, HfViTHybridForMaskedPatchPrediction
from .sizes import check_choice

CONFIGURATIONS = {config.model_type: config for config in (HfViTConfig, HfViTHybridConfig, HfBiTConfig)}
AUTO_MODELS = (
    (AutoModel, HfViTModel),
    (AutoModel, HfViTHybridModel),
    (AutoModel, HfBiTModel),
    (AutoModelForImageClassification, HfViTForImageClassification),
    (AutoModelForImageClassification, HfViTHybridForImageClassification),
    (AutoModelForImageClassification, HfBiTForImageClassification),
    (AutoModelForMaskedImageModeling, HfViTForMaskedPatchPrediction),
    (AutoModelForMaskedImageModeling, HfViTHybridForMaskedPatchPrediction),
    (AutoBackbone, HfViTBackbone),
    (AutoBackbone, HfViTHybridBackbone),
    (AutoBackbone, HfBiTBackbone),
)
MODEL_CLASSES: dict[str, Any] = {model_class.__name__: model_class for _, model_class in AUTO_MODELS}
VARIANTS = (*VIT_VARIANTS, *BIT_VARIANTS)  # architectures by name: "B/16", "R50+L/16", "R50x1"


def config_of_variant(name: str, /, **fields: Any) -> HfViTConfig | HfBiTConfig:
    """Return the configuration of a Vision Transformer, a hybrid or a BiT ResNet.

    Args:
        name: one of `VARIANTS`.
        fields: any field of the configuration.

    Raises:
        ValueError: no architecture has this name.

    Example:
        >>> config_of_variant("R50+L/16", image_size=384).grid_size
        (24, 24)
    """
    check_choice("variant", name, VARIANTS)
    if name in BIT_VARIANTS:
        return HfBiTConfig.from_variant(name, **fields)
    return HfViTConfig.from_variant(name, **fields)


def register_auto_classes() -> None:
    """Register the family with the Auto classes and `pipeline`; a second call changes nothing."""
    for model_type, config_class in CONFIGURATIONS.items():
        AutoConfig.register(model_type, config_class, exist_ok=True)
        both = {"pil": HfViTImageProcessor, "torchvision": HfViTImageProcessor}
        AutoImageProcessor.register(config_class, image_processor_classes=both, exist_ok=True)
    for auto_class, model_class in AUTO_MODELS:
        auto_class.register(model_class.config_class, model_class, exist_ok=True)


register_auto_classes()
