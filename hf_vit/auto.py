"""What transformers' Auto classes find."""

from transformers import AutoBackbone, AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification

from . import modeling_hf_bit as bit
from . import modeling_hf_vit as modeling
from .configuration_hf_bit import HfBiTConfig
from .configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from .image_processing_hf_vit import HfViTImageProcessor
from .pushing import push_saved

CONFIGURATIONS = (HfViTConfig, HfViTHybridConfig, HfBiTConfig)
# The model of each configuration.
AUTO_MODELS = (
    (AutoModel, modeling.HfViTModel, modeling.HfViTHybridModel, bit.HfBiTModel),
    (
        AutoModelForImageClassification,
        modeling.HfViTForImageClassification,
        modeling.HfViTHybridForImageClassification,
        bit.HfBiTForImageClassification,
    ),
    (AutoBackbone, modeling.HfViTBackbone, modeling.HfViTHybridBackbone, bit.HfBiTBackbone),
)


def register_auto_classes() -> None:
    """Make the Auto classes and `pipeline` know the family; and `push_to_hub` our card; again changes nothing."""
    for config_class in CONFIGURATIONS:
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        both = {"pil": HfViTImageProcessor, "torchvision": HfViTImageProcessor}
        AutoImageProcessor.register(config_class, image_processor_classes=both, exist_ok=True)
    for auto_class, *model_classes in AUTO_MODELS:
        for config_class, model_class in zip(CONFIGURATIONS, model_classes, strict=True):
            auto_class.register(config_class, model_class, exist_ok=True)
    # Here and not in the classes' own files, which travel to the Hub without the rest of the package.
    modeling.HfViTPreTrainedModel.push_to_hub = HfViTImageProcessor.push_to_hub = push_saved
