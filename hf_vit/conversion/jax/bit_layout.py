"""The layouts of BiT's JAX checkpoints: big_transfer's released files, and bit.py and bit_paper.py of big_vision.

What a file holds is seen from the name of its root convolution. A ResNet in front of a ViT has the names of bit.py too,
beside those of the ViT (`jax_layout`).
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...models.configuration_hf_bit import ORIGINALS, HfBiTConfig
from ..rules import Layout, Rule, as_is, channels_first, flatten, numbered
from .layout import HEAD, RESNET_PROJECTION, RESNET_UNIT, Dialect, StoredArray, norm

PREFIXES = ("opt/target/", "params/", "")
one_by_one = Layout(  # (1, 1, in, out) -> (out, in): big_transfer's head is a convolution
    lambda kernel: kernel.flatten(0, 2).transpose(0, 1), lambda weight, shape: weight.T[None, None]
)


def big_transfer_norm(theirs: str, ours: str) -> tuple[Rule, Rule]:
    return (
        Rule(f"{theirs}group_norm/gamma", f"{ours}.weight", flatten),
        Rule(f"{theirs}group_norm/beta", f"{ours}.bias", flatten),
    )


class BitNames(NamedTuple):
    """What one of the codes calls its arrays.

    unit_name: of a unit, from the numbers of its stage and of its own.
    unit, projection: below that name, of every unit and of the first of each stage.
    root, last, head: the rest; the first array of `root` tells the codes from each other.
    """

    root: tuple[Rule, ...]
    unit_name: str
    unit: tuple[Rule, ...]
    projection: tuple[Rule, ...]
    last: tuple[Rule, ...]
    head: tuple[Rule, ...]


NAMES = {
    "big_transfer": BitNames(
        root=(Rule("resnet/root_block/standardized_conv2d/kernel", "resnet.convolution.weight", channels_first),),
        unit_name="resnet/block{}/unit{:02d}/",
        unit=tuple(
            rule
            for number, letter in enumerate("abc", 1)
            for rule in (
                *big_transfer_norm(f"{letter}/", f"norm{number}"),
                Rule(f"{letter}/standardized_conv2d/kernel", f"conv{number}.weight", channels_first),
            )
        ),
        projection=(Rule("a/proj/standardized_conv2d/kernel", "downsample.conv.weight", channels_first),),
        last=big_transfer_norm("resnet/", "norm"),
        head=(
            Rule("resnet/head/conv2d/kernel", "classifier.weight", one_by_one),
            Rule("resnet/head/conv2d/bias", "classifier.bias", as_is),
        ),
    ),
    "bit_paper": BitNames(
        root=(Rule("root_block/conv_root/kernel", "resnet.convolution.weight", channels_first),),
        unit_name="block{}/unit{:02d}/",
        unit=RESNET_UNIT,
        projection=RESNET_PROJECTION[:1],  # without a norm
        last=norm("norm-pre-head", "norm", flatten),
        head=HEAD,
    ),
    "bit": BitNames(
        root=(
            Rule("conv_root/kernel", "resnet.convolution.weight", channels_first),
            *norm("gn_root", "resnet.norm", flatten),
        ),
        unit_name="block{}/unit{}/",
        unit=RESNET_UNIT,
        projection=RESNET_PROJECTION,
        last=(),
        head=HEAD,
    ),
}


def rules_for(config: HfBiTConfig, has_head: bool, code: str) -> list[Rule]:
    """Every array of a model, in the names of one of `NAMES` and of `HfBiTForImageClassification`."""
    names = NAMES[code]
    rules = list(names.root)
    for stage, depth in enumerate(config.depths):
        for unit in range(depth):
            theirs, ours = names.unit_name.format(stage + 1, unit + 1), f"resnet.stages.{stage}.layers.{unit}."
            rules += numbered(names.unit, theirs, ours)
            if unit == 0:
                rules += numbered(names.projection, theirs, ours)
    return [*numbered([*rules, *names.last], "", "bit."), *(names.head if has_head else ())]


def recognise(names: list[str]) -> tuple[Dialect, dict[str, StoredArray]] | None:
    """The dialect of a file, and for every name of its rules the array that holds it; None where it holds no BiT.

    Some files of big_transfer number their convolutions (`standardized_conv2d_17`), which says nothing.
    """
    if any(name.endswith("embedding/kernel") for name in names):  # a ResNet in front of a ViT
        return None
    for prefix in PREFIXES:
        stored = {_plain(name.removeprefix(prefix)): StoredArray(name) for name in names if name.startswith(prefix)}
        for code, its_names in NAMES.items():
            if its_names.root[0].theirs in stored:
                return Dialect(code, prefix), stored
    return None


def _plain(name: str) -> str:
    return re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name)


def infer(shapes: Mapping[str, tuple[int, ...]], code: str) -> dict[str, Any]:
    """The fields of the configuration, from the names and shapes of the arrays."""
    _, _, channels, width = shapes[NAMES[code].root[0].theirs]
    units: dict[int, int] = {}
    for name in shapes:
        if match := re.match(r"(?:resnet/)?block(\d+)/unit(\d+)/", name):
            stage, unit = int(match[1]), int(match[2])
            units[stage] = max(units.get(stage, 0), unit)
    depths = [units.get(stage, 1) for stage in range(1, max(units, default=1) + 1)]
    fields = {"num_channels": channels, "embedding_size": width, "depths": depths, **ORIGINALS[code]}
    head = NAMES[code].head[0].theirs
    return {**fields, "num_labels": shapes[head][-1]} if head in shapes else fields
