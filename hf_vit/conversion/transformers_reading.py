"""From a folder of transformers' own `vit`, `vit_mae`, `vit-hybrid` or `bit` to a model.

The tables of names are in `upstream_vit` and `upstream_bit`; `from_pretrained` applies them.
"""

from pathlib import Path
from typing import Any

import torch

from ..configuration_hf_bit import HfBiTConfig
from ..configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from ..modeling_hf_vit import HfViTPreTrainedModel
from ..upstream_bit import translate_bit_settings
from ..upstream_vit import translate_settings
from .building import MODELS
from .rules import ConversionError, check_values

HAS_HEAD = ("ViTForImageClassification", "ViTHybridForImageClassification", "BitForImageClassification")


def read_transformers(
    folder: Path, settings: dict[str, Any], **overrides: Any
) -> tuple[HfViTPreTrainedModel, dict[str, Any]]:
    """Read a folder with a config.json and weights.

    Args:
        settings: its config.json.
        overrides: fields of our configuration.

    Raises:
        ConversionError: weights are missing, left over, of the wrong shape or not finite.
    """
    has_head = any(name in HAS_HEAD for name in settings.get("architectures") or [])
    is_bit = settings["model_type"] == "bit"
    config_class = {"vit-hybrid": HfViTHybridConfig, "bit": HfBiTConfig}.get(settings["model_type"], HfViTConfig)
    try:
        inferred = translate_bit_settings(settings) if is_bit else translate_settings(settings)
        model, info = MODELS[config_class][has_head].from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32, **overrides
        )
    except ValueError as error:
        raise ConversionError(str(error)) from error
    if info["missing_keys"] or info["mismatched_keys"]:
        raise ConversionError(f"{folder} does not hold the head that its config.json speaks of")
    if problems := [text for name, array in model.state_dict().items() for text in check_values(name, array)]:
        raise ConversionError(f"{folder} cannot be used: {'; '.join(problems)}")
    record = {
        "dialect": {"names": "transformers", "model_type": settings["model_type"]},
        "dtypes": [str(settings.get("dtype") or settings.get("torch_dtype") or "float32")],
        "inferred": inferred,
        "overrides": overrides,
        "left_out": {},
        "beside": sorted(info["unexpected_keys"]),
    }
    return model.eval(), record
