"""From a folder of transformers' own `vit`, `vit_mae` or `vit-hybrid` to a model.

The table of names is `upstream_vit.WEIGHT_NAMES`, which `from_pretrained` applies.
"""

from pathlib import Path
from typing import Any

import torch

from .. import modeling_hf_vit as modeling
from ..upstream_vit import class_for_upstream, translate_settings
from .rules import ConversionError, check_values


def read_transformers(
    folder: Path, settings: dict[str, Any], **overrides: Any
) -> tuple[modeling.HfViTPreTrainedModel, dict[str, Any]]:
    """Read a folder with a config.json and weights.

    Args:
        settings: its config.json.
        overrides: fields of our configuration.

    Raises:
        ConversionError: weights are missing, left over, of the wrong shape or not finite.
    """
    model_class = getattr(modeling, class_for_upstream(settings))
    try:
        inferred = translate_settings(settings)
        model, info = model_class.from_pretrained(folder, output_loading_info=True, dtype=torch.float32, **overrides)
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
