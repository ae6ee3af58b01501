"""Choice of our class for a folder of transformers' own `vit`, `vit_mae`, `vit-hybrid` or `bit`."""

from typing import Any

from .models.configuration_hf_bit import HfBiTConfig, is_upstream_bit
from .models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, is_upstream
from .models.modeling_hf_bit import HfBiTForImageClassification, HfBiTModel
from .models.modeling_hf_vit import (
    HfViTForImageClassification,
    HfViTHybridForImageClassification,
    HfViTHybridModel,
    HfViTModel,
)
from .models.pretrained import HfVisionPreTrainedModel

# By configuration: the bare encoder and the classifier.
MODELS: dict[type, tuple[type[HfVisionPreTrainedModel], type[HfVisionPreTrainedModel]]] = {
    HfViTConfig: (HfViTModel, HfViTForImageClassification),
    HfViTHybridConfig: (HfViTHybridModel, HfViTHybridForImageClassification),
    HfBiTConfig: (HfBiTModel, HfBiTForImageClassification),
}
_HAS_HEAD = ("ViTForImageClassification", "ViTHybridForImageClassification", "BitForImageClassification")


def is_of_transformers(settings: dict[str, Any]) -> bool:
    """Tell whether a config.json belongs to one of transformers' models that hf_vit reads."""
    return is_upstream(settings) or is_upstream_bit(settings)


def model_class_for(settings: dict[str, Any]) -> type[HfVisionPreTrainedModel]:
    """Return the class for a folder of transformers: a classifier if it has a head, else the bare encoder."""
    has_head = any(name in _HAS_HEAD for name in settings.get("architectures") or [])
    config_class = {"vit-hybrid": HfViTHybridConfig, "bit": HfBiTConfig}.get(settings["model_type"], HfViTConfig)
    return MODELS[config_class][has_head]
