"""From a checkpoint of timm, torchvision, DeiT, MAE or DINO to a model: inferred from names and shapes of arrays."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...models.pretrained import HfViTPreTrainedModel
from ..building import check_required, empty_model, is_untrained, rules_for_model
from ..rules import ConversionError, to_ours
from ..timm import bit_layout as timm_bit_layout
from ..timm import layout as timm_layout
from . import torchvision_layout
from .files import read_arrays

# Heads of a known width that is not made of heads of 64 (ViT-H; So400m, g and G of big_vision).
HEADS = {1280: 16, 1152: 16, 1408: 16, 1664: 16}


# The modules that declare how each family names its arrays.
FAMILIES = {"timm": timm_layout, "torchvision": torchvision_layout, "timm_bit": timm_bit_layout}


def read_torch(
    path: Path,
    position_grid: tuple[int, int] | None = None,
    settings: dict[str, Any] | None = None,
    **overrides: Any,
) -> tuple[HfViTPreTrainedModel, dict[str, Any]]:
    """Read a .safetensors, .pth, .pt or .bin of one of `FAMILIES`.

    Args:
        path: the file; nothing in it is unpickled.
        position_grid: (rows, columns) of the table of positions; a square by default.
        settings: the config.json beside it.
        overrides: fields of the configuration that no array shows, such as `num_attention_heads`.

    Returns:
        The model in float32, without a head where the file has none (or one that is all zero), and what was inferred.

    Raises:
        ConversionError: the file does not hold such a ViT, or arrays are missing, left over, of the wrong shape or
            not finite.
    """
    arrays, container = read_arrays(path)
    names, prefix = recognise(arrays, path.name)
    family = FAMILIES[names]
    stated = family.settings_of(settings or {})
    own = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    left_out = sorted(name for name in own if family.BESIDE and re.search(family.BESIDE, name))
    own = family.canonical({name: array for name, array in own.items() if name not in left_out}, position_grid)
    zero_head = _zero_head(own, family.CLASSIFIER)
    if zero_head:
        own = {name: array for name, array in own.items() if not name.startswith(f"{family.CLASSIFIER}.")}

    shapes = {name: tuple(array.shape) for name, array in own.items()}
    check_required(shapes, family.REQUIRED, family.OPTIONAL, path.name)
    fields = {**family.infer(shapes, position_grid, path.name), **stated, **overrides}
    if "hidden_size" in fields:
        fields = {"num_attention_heads": _num_heads(fields, path.name), **fields}
    has_head = f"{family.CLASSIFIER}.weight" in own
    model = empty_model(fields, has_head)
    rules = rules_for_model(model, family.rules_for(model.config, has_head))
    model.load_state_dict(to_ours(own, model.state_dict(), rules, path.name), assign=True)
    record = {
        "dialect": {"names": names, "prefix": prefix, "container": container},
        "dtypes": sorted({str(array.dtype).removeprefix("torch.") for array in own.values()}),
        "inferred": {name: value for name, value in fields.items() if name not in overrides},
        "overrides": overrides,
        "left_out": zero_head,
        "beside": left_out + sorted(name for name in arrays if not name.startswith(prefix)),
    }
    return model.eval(), record


def recognise(arrays: Mapping[str, torch.Tensor], file: str) -> tuple[str, str]:
    """The family that names its arrays so, and what stands before every name ("module.", "backbone.", ...).

    Raises:
        ConversionError: none does.
    """
    for names, family in FAMILIES.items():
        ours = [name for name in arrays if name == family.MARKER or name.endswith(f".{family.MARKER}")]
        if ours:
            return names, min(ours, key=len).removesuffix(family.MARKER)
    if any("embeddings.patch_embeddings" in name for name in arrays):
        raise ConversionError(f"{file} has the names of transformers: give the folder that holds its config.json too")
    some = ", ".join(sorted(arrays)[:3])
    raise ConversionError(f"{file} holds an unknown architecture (arrays such as {some}); hf_vit converts ViTs and BiT")


def _zero_head(arrays: Mapping[str, torch.Tensor], head: str) -> dict[str, Any]:
    """An untrained head: its shape, as JAX has it, and bias; empty for any other."""
    weight, bias = arrays.get(f"{head}.weight"), arrays.get(f"{head}.bias")
    if weight is None or bias is None or weight.ndim not in (2, 4) or not is_untrained(weight, bias):
        return {}
    return {"head": {"shape": list(weight.flatten(1).T.shape), "bias": float(bias[0])}}


def _num_heads(fields: dict[str, Any], file: str) -> int:
    """Fused projections do not show it: heads of 64 are the rule."""
    hidden_size = fields["hidden_size"]
    if "num_attention_heads" in fields:
        return fields["num_attention_heads"]
    if hidden_size in HEADS:
        return HEADS[hidden_size]
    if hidden_size % 64:
        raise ConversionError(
            f"{file} does not say how many attention heads share its {hidden_size} channels, "
            "which are no multiple of 64; state num_attention_heads"
        )
    return hidden_size // 64
