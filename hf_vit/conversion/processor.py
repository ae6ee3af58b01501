"""The image processor that goes with a model."""

from typing import Any

from ..images.image_processing_hf_vit import HfViTImageProcessor
from ..models.configuration_hf_vision import HfVisionConfig, as_pair
from ..models.configuration_hf_vit import HfViTConfig

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
BILINEAR, BICUBIC = 2, 3  # PIL.Image.Resampling


def build_processor(config: HfVisionConfig, **settings: Any) -> HfViTImageProcessor:
    """The image processor of a model: its size, channels and patches, and a preset's way of getting there."""
    height, width = as_pair(config.image_size)
    own: dict[str, Any] = {"size": {"height": height, "width": width}, "num_channels": config.num_channels}
    if isinstance(config, HfViTConfig):
        own["patch_size"] = [size * config.stride for size in as_pair(config.patch_size)]
    return HfViTImageProcessor(**{**own, **settings})
