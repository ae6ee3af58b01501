"""All architectures by name: "B/16", "R50+L/16", "R50x1"."""

from typing import Any

from .models import configuration_hf_bit as bit
from .models import configuration_hf_vit as vit
from .models.configuration_hf_bit import HfBiTConfig
from .models.configuration_hf_vit import HfViTConfig, check_choice

VARIANTS = (*vit.VARIANTS, *bit.VARIANTS)


def config_of_variant(name: str, /, **fields: Any) -> HfViTConfig | HfBiTConfig:
    """Return the configuration of a Vision Transformer, a hybrid or a BiT ResNet.

    Args:
        name: one of `VARIANTS`.
        fields: any field of the configuration.

    Raises:
        ValueError: no architecture has this name.

    Example:
        >>> from hf_vit.variants import config_of_variant
        >>> config_of_variant("R50+L/16", image_size=384).grid_size
        (24, 24)
    """
    check_choice("variant", name, VARIANTS)
    return (HfBiTConfig if name in bit.VARIANTS else HfViTConfig).from_variant(name, **fields)
