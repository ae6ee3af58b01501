"""The layout of torchvision's Vision Transformers (torchvision/models/vision_transformer.py)."""

from collections.abc import Mapping
from typing import Any

import torch

from ...models.configuration_hf_vit import HfViTConfig
from ..building import grid_of, image_size_of, one_or_pair
from ..rules import Rule, as_is, numbered, part
from ..timm.layout import parameters

MARKER = "conv_proj.weight"
CLASSIFIER = "heads.head"
POSITIONS = "encoder.pos_embedding"
REQUIRED = {MARKER: 4, POSITIONS: 3, "encoder.layers.encoder_layer_0.mlp.0.weight": 2}
OPTIONAL = {"heads.pre_logits.weight": 2, "heads.head.weight": 2}
BESIDE = None

EMBEDDINGS = (
    Rule("class_token", "embeddings.cls_token", as_is),
    *parameters("conv_proj", "embeddings.patch_embeddings.projection"),
    Rule(POSITIONS, "embeddings.position_embeddings", as_is),
)
# in_proj_weight and in_proj_bias hold query, key and value
ENCODER_BLOCK = (
    *parameters("ln_1", "layernorm_before"),
    *(
        Rule(f"self_attention.in_proj_{kind}", f"attention.{projection}.{kind}", part(index, 3))
        for index, projection in enumerate(("q_proj", "k_proj", "v_proj"))
        for kind in ("weight", "bias")
    ),
    *parameters("self_attention.out_proj", "attention.o_proj"),
    *parameters("ln_2", "layernorm_after"),
    *parameters("mlp.0", "mlp.fc1"),
    *parameters("mlp.3", "mlp.fc2"),
)


def rules_for(config: HfViTConfig, has_head: bool) -> list[Rule]:
    """Every array of a model, in the names of torchvision and of `HfViTForImageClassification`."""
    rules = list(numbered(EMBEDDINGS, "", "vit."))
    for index in range(config.num_hidden_layers):
        rules += numbered(ENCODER_BLOCK, f"encoder.layers.encoder_layer_{index}.", f"vit.layers.{index}.")
    rules += parameters("encoder.ln", "vit.layernorm")
    if config.representation_size is not None:
        rules += parameters("heads.pre_logits", "vit.pooler.dense")
    return [*rules, *parameters("heads.head", "classifier")] if has_head else rules


def canonical(arrays: dict[str, torch.Tensor], position_grid: tuple[int, int] | None) -> dict[str, torch.Tensor]:
    """The same arrays in present-day names: before 0.13, an MLP had `linear_1` and `linear_2`."""
    return {name.replace("mlp.linear_1.", "mlp.0.").replace("mlp.linear_2.", "mlp.3."): array
            for name, array in arrays.items()}  # fmt: skip


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """torchvision keeps no config.json."""
    return {}


def infer(shapes: Mapping[str, tuple[int, ...]], position_grid: tuple[int, int] | None, file: str) -> dict[str, Any]:
    """The fields of the configuration, all but the number of heads."""
    hidden_size, channels, *pixels = shapes[MARKER]
    grid = grid_of(shapes[POSITIONS][1] - 1, position_grid, file)
    block = "encoder.layers.encoder_layer_"
    layers = {int(name[len(block) :].split(".")[0]) for name in shapes if name.startswith(block)}
    fields = {
        "hidden_size": hidden_size,
        "num_hidden_layers": max(layers) + 1,
        "intermediate_size": shapes[f"{block}0.mlp.0.weight"][0],
        "image_size": image_size_of(grid, pixels),
        "patch_size": one_or_pair(*pixels),
        "num_channels": channels,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "position_interpolation": "bicubic",
        "representation_size": None,
    }
    if "heads.pre_logits.weight" in shapes:
        fields["representation_size"] = shapes["heads.pre_logits.weight"][0]
    if "heads.head.weight" in shapes:
        fields["num_labels"] = shapes["heads.head.weight"][0]
    return fields
