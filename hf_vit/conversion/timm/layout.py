"""The layout of timm's Vision Transformers and hybrids, which DeiT, MAE and DINO share.

The names are those of timm 1.0 (timm/models/vision_transformer.py, vision_transformer_hybrid.py); `pre_logits.fc` is of
timm before 0.6.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, stem_stride
from ..building import default_grid, fits, grid_of, image_size_of, one_or_pair
from ..rules import ConversionError, Rule, as_is, numbered, part

MARKER = "patch_embed.proj.weight"  # every such model has it
CLASSIFIER = "head"
POSITIONS = "pos_embed"
# What sizes are read from, and how many axes each must have.
RESNET_ROOTS = ("patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.conv.weight")
REQUIRED = {MARKER: 4, "blocks.0.mlp.fc1.weight": 2}
OPTIONAL = {POSITIONS: 3, "pre_logits.fc.weight": 2, "head.weight": 2, **dict.fromkeys(RESNET_ROOTS, 4)}
# Heads of self-supervision and the decoder of MAE, which are not part of the encoder.
BESIDE = r"^(mask_token$|decoder_|decoder\.|head\.(mlp|last_layer)\.)"

# What timm calls our activations and poolings.
ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu", "quick_gelu": "quick_gelu"}
POOLINGS = {"token": "cls", "avg": "mean", "map": "map", "": "none"}


def parameters(theirs: str, ours: str, layout=as_is, bias: bool = True) -> Iterator[Rule]:
    yield Rule(f"{theirs}.weight", f"{ours}.weight", layout)
    if bias:
        yield Rule(f"{theirs}.bias", f"{ours}.bias", layout)


def fused(theirs: str, ours: str, projections: tuple[str, ...], bias: bool = True) -> Iterator[Rule]:
    for index, projection in enumerate(projections):
        yield from parameters(theirs, f"{ours}{projection}", part(index, len(projections)), bias)


def encoder_block(qkv_bias: bool) -> tuple[Rule, ...]:
    return (
        *parameters("norm1", "layernorm_before"),
        *fused("attn.qkv", "attention.", ("q_proj", "k_proj", "v_proj"), qkv_bias),
        *parameters("attn.proj", "attention.o_proj"),
        *parameters("norm2", "layernorm_after"),
        *parameters("mlp.fc1", "mlp.fc1"),
        *parameters("mlp.fc2", "mlp.fc2"),
    )


PATCHES = tuple(parameters("patch_embed.proj", "embeddings.patch_embeddings.projection"))
MAP_HEAD = (
    Rule("attn_pool.latent", "pooler.map.probe", as_is),
    *parameters("attn_pool.q", "pooler.map.q_proj"),
    *fused("attn_pool.kv", "pooler.map.", ("k_proj", "v_proj")),
    *parameters("attn_pool.proj", "pooler.map.o_proj"),
    *parameters("attn_pool.norm", "pooler.map.layernorm"),
    *parameters("attn_pool.mlp.fc1", "pooler.map.mlp.fc1"),
    *parameters("attn_pool.mlp.fc2", "pooler.map.mlp.fc2"),
)
RESNET_ROOT = (
    *parameters("conv", "convolution", bias=False),
    *parameters("norm", "norm"),
)
RESNET_UNIT = tuple(
    rule
    for number in (1, 2, 3)
    for rule in (
        *parameters(f"conv{number}", f"conv{number}", bias=False),
        *parameters(f"norm{number}", f"norm{number}"),
    )
)
RESNET_PROJECTION = (
    *parameters("downsample.conv", "downsample.conv", bias=False),
    *parameters("downsample.norm", "downsample.norm"),
)
HEAD = tuple(parameters("head", "classifier"))


def rules_for(config: HfViTConfig, has_head: bool) -> list[Rule]:
    """Every array of a model, in the names of timm and of `HfViTForImageClassification`."""
    rules: list[Rule] = []
    if isinstance(config, HfViTHybridConfig):
        rules += numbered(resnet_rules(config), "patch_embed.backbone.", "vit.embeddings.stem.")
    rules += numbered(PATCHES, "", "vit.")
    if config.use_cls_token:
        rules.append(Rule("cls_token", "vit.embeddings.cls_token", as_is))
    if config.position_embedding_type == "learned":
        rules.append(Rule(POSITIONS, "vit.embeddings.position_embeddings", as_is))
    for index in range(config.num_hidden_layers):
        rules += numbered(encoder_block(config.qkv_bias), f"blocks.{index}.", f"vit.layers.{index}.")
    rules += parameters("fc_norm" if config.norm_after_pooling else "norm", "vit.layernorm")
    if config.pooling == "map":
        rules += numbered(MAP_HEAD, "", "vit.")
    if config.representation_size is not None:
        rules += parameters("pre_logits.fc", "vit.pooler.dense")
    return [*rules, *HEAD] if has_head else rules


def resnet_rules(config: HfViTHybridConfig) -> list[Rule]:
    rules = list(numbered(RESNET_ROOT, "stem." if config.stem_depths else "", ""))
    for stage, depth in enumerate(config.stem_depths):
        for unit in range(depth):
            theirs, ours = f"stages.{stage}.blocks.{unit}.", f"stages.{stage}.layers.{unit}."
            rules += numbered(RESNET_UNIT, theirs, ours)
            if unit == 0:
                rules += numbered(RESNET_PROJECTION, theirs, ours)
    return rules


def canonical(arrays: dict[str, torch.Tensor], position_grid: tuple[int, int] | None) -> dict[str, torch.Tensor]:
    """The same arrays with the shapes that the rules speak of: a row of positions for the class token too.

    DeiT III and FlexiViT have none (`no_embed_class`): nothing is added to their class token.
    """
    table = arrays.get(POSITIONS)
    if table is None or table.ndim != 3 or "cls_token" not in arrays or not fits(table.shape[1], position_grid):
        return arrays
    return {**arrays, POSITIONS: pad(table, (0, 0, 1, 0))}


def infer(shapes: Mapping[str, tuple[int, ...]], position_grid: tuple[int, int] | None, file: str) -> dict[str, Any]:
    """The fields of the configuration, all but the number of heads."""
    hidden_size, map_channels, patch_rows, patch_columns = shapes[MARKER]
    has_cls, has_map, norm_last = "cls_token" in shapes, "attn_pool.latent" in shapes, "fc_norm.weight" in shapes
    pooling = "map" if has_map else "cls" if has_cls and not norm_last else "mean"
    stem = _infer_stem(shapes)
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")),
        "intermediate_size": shapes["blocks.0.mlp.fc1.weight"][0],
        "patch_size": one_or_pair(patch_rows, patch_columns),
        "num_channels": map_channels,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "pooling": pooling,
        "use_cls_token": has_cls,
        "pool_patches_only": has_cls,
        "norm_after_pooling": norm_last,
        "representation_size": shapes["pre_logits.fc.weight"][0] if "pre_logits.fc.weight" in shapes else None,
        "position_interpolation": "bicubic",
        **stem,
    }
    if "head.weight" in shapes:
        fields["num_labels"] = shapes["head.weight"][0]
    stride = stem_stride(stem["stem_depths"]) if stem else 1
    pixels = patch_rows * stride, patch_columns * stride
    if POSITIONS not in shapes:
        size = image_size_of(position_grid or default_grid(pixels), pixels)
        return {**fields, "position_embedding_type": "none", "image_size": size}
    grid = grid_of(shapes[POSITIONS][1] - has_cls, position_grid, file)
    return {**fields, "image_size": image_size_of(grid, pixels)}


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of the configuration that the config.json of a timm folder states and no array shows."""
    arguments = config.get("model_args") or {}
    fields: dict[str, Any] = {}
    if "act_layer" in arguments:
        fields["hidden_act"] = ACTIVATIONS.get(arguments["act_layer"], arguments["act_layer"])
    if "num_heads" in arguments:
        fields["num_attention_heads"] = arguments["num_heads"]
    if "global_pool" in config:
        if config["global_pool"] not in POOLINGS:
            raise ConversionError(f"its global_pool is {config['global_pool']!r}; hf_vit has {', '.join(POOLINGS)}")
        fields["pooling"] = POOLINGS[config["global_pool"]]
    return fields


def _infer_stem(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    root = next((shapes[name] for name in RESNET_ROOTS if name in shapes), None)
    if root is None:
        return {}
    depths: dict[int, int] = {}
    for name in shapes:
        if match := re.match(r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.", name):
            stage, unit = int(match[1]), int(match[2])
            depths[stage] = max(depths.get(stage, 0), unit + 1)
    return {
        "stem_depths": [depths.get(stage, 1) for stage in range(max(depths, default=-1) + 1)],
        "stem_width": root[0],
        "num_channels": root[1],
        # StdConv2dSame(eps=1e-8) and GroupNormAct of timm's hybrids
        "group_norm_eps": 1e-5,
        "weight_standardization_eps": 1e-8,
        "weight_standardization_form": "variance",
    }
