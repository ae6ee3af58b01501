"""The layout of timm's BiT ResNets, `resnetv2_*_bit` (timm/models/resnetv2.py of timm 1.0)."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from ...models.configuration_hf_bit import HfBiTConfig
from ..building import one_or_pair
from ..rules import ConversionError, Layout, Rule, as_is, numbered
from .layout import RESNET_PROJECTION, RESNET_UNIT, parameters

MARKER = "stages.0.blocks.0.conv1.weight"
CLASSIFIER = "head.fc"
ROOT = "stem.conv.weight"
# A norm after the root or in a projection is of another ResNet of timm, and left over.
REQUIRED = {ROOT: 4, MARKER: 4, "norm.weight": 1}
OPTIONAL = {"head.fc.weight": 4}
BESIDE = None

one_by_one = Layout(  # (out, in, 1, 1) -> (out, in): the head is a convolution
    lambda kernel: kernel.flatten(1), lambda weight, shape: weight[:, :, None, None]
)
HEAD = (
    Rule("head.fc.weight", "classifier.weight", one_by_one),
    Rule("head.fc.bias", "classifier.bias", as_is),
)


def rules_for(config: HfBiTConfig, has_head: bool) -> list[Rule]:
    """Every array of a model, in the names of timm and of `HfBiTForImageClassification`."""
    rules = [Rule(ROOT, "resnet.convolution.weight", as_is)]
    for stage, depth in enumerate(config.depths):
        for unit in range(depth):
            theirs, ours = f"stages.{stage}.blocks.{unit}.", f"resnet.stages.{stage}.layers.{unit}."
            rules += numbered(RESNET_UNIT, theirs, ours)
            if unit == 0:
                rules += numbered(RESNET_PROJECTION[:1], theirs, ours)  # without a norm
    rules += parameters("norm", "norm")
    return [*numbered(rules, "", "bit."), *(HEAD if has_head else ())]


def canonical(arrays: dict[str, torch.Tensor], position_grid: tuple[int, int] | None) -> dict[str, torch.Tensor]:
    return arrays


def infer(shapes: Mapping[str, tuple[int, ...]], position_grid: tuple[int, int] | None, file: str) -> dict[str, Any]:
    """The fields of the configuration."""
    width, channels, *_ = shapes[ROOT]
    units: dict[int, int] = {}
    for name in shapes:
        if match := re.match(r"stages\.(\d+)\.blocks\.(\d+)\.", name):
            stage, unit = int(match[1]), int(match[2])
            units[stage] = max(units.get(stage, 0), unit + 1)
    fields = {
        "num_channels": channels,
        "embedding_size": width,
        "depths": [units.get(stage, 1) for stage in range(max(units) + 1)],
        "weight_standardization_eps": 1e-8,  # StdConv2d(eps=1e-8) of _create_resnetv2_bit; the rest is big_transfer's
    }
    return {**fields, "num_labels": shapes["head.fc.weight"][0]} if "head.fc.weight" in shapes else fields


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """The size of the images that the config.json of a timm folder states."""
    if config.get("global_pool", "avg") != "avg":
        raise ConversionError(f"its global_pool is {config['global_pool']!r}; a BiT of hf_vit has avg")
    size = (config.get("pretrained_cfg") or config).get("input_size")
    return {} if size is None else {"image_size": one_or_pair(*size[1:])}
