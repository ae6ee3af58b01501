"""Registration with transformers' Auto classes, when this module is imported."""

from typing import Any

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
)

from .models import modeling_hf_bit as bit
from .models import modeling_hf_vit as modeling
from .models.configuration_hf_bit import HfBiTConfig
from .models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from .models.image_processing_hf_vit import HfViTImageProcessor
from .models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction, HfViTHybridForMaskedPatchPrediction

CONFIGURATIONS = {config.model_type: config for config in (HfViTConfig, HfViTHybridConfig, HfBiTConfig)}
AUTO_MODELS = (
    (AutoModel, modeling.HfViTModel),
    (AutoModel, modeling.HfViTHybridModel),
    (AutoModel, bit.HfBiTModel),
    (AutoModelForImageClassification, modeling.HfViTForImageClassification),
    (AutoModelForImageClassification, modeling.HfViTHybridForImageClassification),
    (AutoModelForImageClassification, bit.HfBiTForImageClassification),
    (AutoModelForMaskedImageModeling, HfViTForMaskedPatchPrediction),
    (AutoModelForMaskedImageModeling, HfViTHybridForMaskedPatchPrediction),
    (AutoBackbone, modeling.HfViTBackbone),
    (AutoBackbone, modeling.HfViTHybridBackbone),
    (AutoBackbone, bit.HfBiTBackbone),
)
MODEL_CLASSES: dict[str, Any] = {model_class.__name__: model_class for _, model_class in AUTO_MODELS}


def register_auto_classes() -> None:
    """Register the family with the Auto classes and `pipeline`; a second call changes nothing."""
    for model_type, config_class in CONFIGURATIONS.items():
        AutoConfig.register(model_type, config_class, exist_ok=True)
        both = {"pil": HfViTImageProcessor, "torchvision": HfViTImageProcessor}
        AutoImageProcessor.register(config_class, image_processor_classes=both, exist_ok=True)
    for auto_class, model_class in AUTO_MODELS:
        auto_class.register(model_class.config_class, model_class, exist_ok=True)


register_auto_classes()
