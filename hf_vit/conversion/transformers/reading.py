"""From a folder of transformers' own `vit`, `vit_mae`, `vit-hybrid` or `bit` to a model.

The tables of names are in `upstream_vit` and `upstream_bit`; `from_pretrained` applies them.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from ...models.configuration_hf_vit import HfViTConfig
from ...models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction
from ...models.pretrained import HfViTPreTrainedModel
from ...models.upstream import model_class_for
from ...models.upstream_bit import is_upstream_bit, translate_bit_settings
from ...models.upstream_vit import translate_settings
from ..rules import ConversionError, check_values


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
    try:
        inferred = translate_bit_settings(settings) if is_upstream_bit(settings) else translate_settings(settings)
        if _rebuilds_whole_patches(settings):
            model, info = _load_masked_image_model(folder, inferred | overrides)
        else:
            model, info = model_class_for(settings).from_pretrained(
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


def _rebuilds_whole_patches(settings: dict[str, Any]) -> bool:
    """Whether it is a `ViTForMaskedImageModeling` whose decoder sees each patch as it is; MAE's is a Transformer."""
    defaults = transformers.ViTConfig()
    patch_size, stride = (settings.get(name, getattr(defaults, name)) for name in ("patch_size", "encoder_stride"))
    return settings.get("architectures") == ["ViTForMaskedImageModeling"] and patch_size == stride


def _load_masked_image_model(
    folder: Path, fields: dict[str, Any]
) -> tuple[HfViTForMaskedPatchPrediction, dict[str, Any]]:
    """Its decoder, a 1 x 1 convolution and a PixelShuffle, is our linear layer that predicts pixels."""
    theirs, info = transformers.ViTForMaskedImageModeling.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
        folder, output_loading_info=True, dtype=torch.float32
    )
    with torch.device("meta"):
        model = HfViTForMaskedPatchPrediction(HfViTConfig(**{**fields, "patch_target": "pixels"}))
    weights = theirs.state_dict()
    weights["mask_token"] = weights.pop("vit.embeddings.mask_token")
    weights["predictor.weight"] = weights.pop("decoder.0.weight").flatten(1)
    weights["predictor.bias"] = weights.pop("decoder.0.bias")
    model.load_state_dict(weights, assign=True)
    return model, info
