"""From a model to a checkpoint that timm loads."""

import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ...files.output import new_file, new_folder
from ...models.configuration_hf_bit import DEPTHS, HfBiTConfig
from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, as_pair
from ...models.modeling_hf_bit import HfBiTForImageClassification, HfBiTModel, numbers_of
from ...models.modeling_hf_vit import HfViTForImageClassification, HfViTModel, HfViTPreTrainedModel
from ...models.resnet_stem import StemNumbers
from ..building import rules_for_model, variants_of_the_paper
from ..rules import ConversionError, to_theirs
from . import bit_layout as timm_bit_layout
from .layout import ACTIVATIONS, POOLINGS, rules_for

STEM_NUMBERS = StemNumbers(1e-5, 1e-8, "variance")  # of timm's hybrids; they have no argument for them
# The architecture of timm with each stem; every other size is an argument.
HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
BIT_NUMBERS = STEM_NUMBERS._replace(padding="fixed", pool_padding="zero")
BITS = {(DEPTHS[layers], factor): f"resnetv2_{layers}x{factor}_bit"
        for layers, factor in ((50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4))}  # fmt: skip


def export_timm(model: HfViTPreTrainedModel, path: str | os.PathLike, overwrite: bool = False) -> dict[str, Any]:
    """Write a model as timm has it.

    A file holds the weights alone. A folder says too how the model is built, so that
    `timm.create_model("local-dir:FOLDER")` computes what this model computes.

    Args:
        model: with or without a head.
        path: a .safetensors file, or a folder; it appears when it is complete.
        overwrite: whether it may replace what is there.

    Returns:
        The arguments of `timm.create_model` with which the weights compute the same: timm's defaults differ, since
        released models have tanh GELU.

    Raises:
        ConversionError: timm has no such model.
        FileExistsError: `path` exists and may not be overwritten.
    """
    if isinstance(model, HfBiTModel | HfBiTForImageClassification):
        return _export_bit(model, path, overwrite)
    if not isinstance(model, HfViTModel | HfViTForImageClassification):
        raise ConversionError(f"{type(model).__name__} has no counterpart in timm; convert its encoder or classifier")
    _check_expressible(model.config)
    has_head = model.base_model is not model
    arrays = to_theirs(model.state_dict(), rules_for_model(model, rules_for(model.config, has_head)))
    arguments = model_arguments(model.config, has_head)
    return _write(path, arrays, timm_config(model.config, arguments), overwrite)


def _export_bit(model: HfViTPreTrainedModel, path: str | os.PathLike, overwrite: bool) -> dict[str, Any]:
    config = model.config
    architecture = BITS.get((tuple(config.depths), config.embedding_size / 64))
    if architecture is None:
        raise ConversionError(f"timm has no BiT of depths {config.depths} with {config.embedding_size} channels")
    if config.layer_type != "preactivation" or numbers_of(config) != BIT_NUMBERS:
        raise ConversionError(f"timm has no {config.layer_type} ResNet with {numbers_of(config)}")
    has_head = model.base_model is not model
    rules = rules_for_model(model, timm_bit_layout.rules_for(config, has_head))
    arguments = {"in_chans": config.num_channels, "num_classes": config.num_labels if has_head else 0}
    description = _description(config, architecture, arguments["num_classes"], "bilinear", 0.875)
    return _write(path, to_theirs(model.state_dict(), rules), {**description, "model_args": arguments}, overwrite)


def _write(path: str | os.PathLike, arrays: dict, description: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """The weights, and for a folder how the model is built; returns the arguments of `timm.create_model`."""
    arguments = description["model_args"]
    if Path(path).suffix == ".safetensors":
        with new_file(path, overwrite) as file:
            save_file(arrays, file, metadata={"format": "pt"})
        return arguments
    with new_folder(path, overwrite) as folder:
        save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")
    return arguments


def _check_expressible(config: HfViTConfig) -> None:
    problems = variants_of_the_paper(config)
    if config.representation_size is not None:
        problems.append("pre-logits layer (representation_size)")
    if config.position_embedding_type == "sincos2d":
        problems.append("position embeddings of type sincos2d")
    if config.hidden_act not in ACTIVATIONS.values():
        problems.append(f"activation {config.hidden_act}")
    if config.pooling in ("mean", "map") and config.use_cls_token and not config.pool_patches_only:
        problems.append("pooling that sees the class token as well")
    if config.pooling == "cls" and config.norm_after_pooling:
        problems.append("LayerNorm of the class token alone")
    if isinstance(config, HfViTHybridConfig) and tuple(config.stem_depths) not in HYBRIDS:
        problems.append(f"ResNet of depths {list(config.stem_depths)}")
    if problems:
        raise ConversionError(f"timm has no {', no '.join(problems)}")


def model_arguments(config: HfViTConfig, has_head: bool) -> dict[str, Any]:
    """Of `timm.create_model`, whatever the architecture's own are."""
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.hidden_act)
    arguments = {
        "img_size": list(as_pair(config.image_size)),
        "in_chans": config.num_channels,
        "num_classes": config.num_labels if has_head else 0,
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": config.intermediate_size / config.hidden_size,
        "qkv_bias": config.qkv_bias,
        "act_layer": activation,
        "class_token": config.use_cls_token,
        "global_pool": next(theirs for theirs, ours in POOLINGS.items() if ours == config.pooling),
        "fc_norm": config.norm_after_pooling,
    }
    if config.position_embedding_type == "none":
        arguments["pos_embed"] = "none"
    return arguments if isinstance(config, HfViTHybridConfig) else arguments | {"patch_size": config.patch_size}


def timm_config(config: HfViTConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a timm folder."""
    architecture = "vit_base_patch16_224"
    if isinstance(config, HfViTHybridConfig):
        architecture = HYBRIDS[tuple(config.stem_depths)]
    description = _description(config, architecture, arguments["num_classes"], "bicubic", 0.9)
    return {**description, "global_pool": arguments["global_pool"], "model_args": arguments}


def _description(
    config: HfViTConfig | HfBiTConfig, architecture: str, num_classes: int, interpolation: str, crop_pct: float
) -> dict[str, Any]:
    height, width = as_pair(config.image_size)
    names = [(config.id2label or {})[index] for index in range(num_classes)]
    has_names = any(name != f"LABEL_{index}" for index, name in enumerate(names))
    return {
        "architecture": architecture,
        "num_classes": num_classes,
        **({"label_names": names} if has_names else {}),
        "num_features": config.hidden_size,
        "pretrained_cfg": {
            "input_size": [config.num_channels, height, width],
            "interpolation": interpolation,
            "crop_pct": crop_pct if max(height, width) < 384 else 1.0,
            "mean": [0.5] * config.num_channels,
            "std": [0.5] * config.num_channels,
            "num_classes": num_classes,
        },
    }
