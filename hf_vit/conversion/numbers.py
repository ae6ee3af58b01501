"""Numbers of other libraries that several sources share."""

from typing import Any

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
# Numbers of timm's ResNets (GroupNormAct, StdConv2dSame) and, after them, of transformers' BiT (modeling_bit.py).
TIMM_NUMBERS: dict[str, Any] = {
    "group_norm_eps": 1e-5,
    "weight_standardization_eps": 1e-8,
    "weight_standardization_form": "variance",
}
