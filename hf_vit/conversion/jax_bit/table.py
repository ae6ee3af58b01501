"""Rules of BiT's JAX checkpoints, for each of the codes that wrote them."""

from typing import NamedTuple

from ...models.configuration_hf_bit import HfBiTConfig
from ..jax.table import HEAD, RESNET_PROJECTION, RESNET_ROOT, RESNET_UNIT, norm
from ..rules import Layout, Rule, as_is, channels_first, flatten, resnet_units, table

_one_by_one = Layout(  # (1, 1, in, out) -> (out, in): big_transfer's head is a convolution
    lambda kernel: kernel.flatten(0, 2).transpose(0, 1), lambda weight: weight.T[None, None]
)
_vector = Layout(flatten.to_ours, as_is.to_theirs)


def _big_transfer_norm(theirs: str, ours: str) -> tuple[Rule, Rule]:
    return (
        Rule(f"{theirs}group_norm/gamma", f"{ours}.weight", _vector),
        Rule(f"{theirs}group_norm/beta", f"{ours}.bias", _vector),
    )


class BitNames(NamedTuple):
    """Rules of one of the codes.

    root: rules of the root; the name of its first array identifies the code.
    unit_name: format of a unit's name, with the numbers of stage and unit.
    unit, projection: rules of every unit, and additional rules of the first unit of each stage.
    last, head: rules of the last norm and of the head.
    head_axes: number of axes of the head's weight.
    """

    root: tuple[Rule, ...]
    unit_name: str
    unit: tuple[Rule, ...]
    projection: tuple[Rule, ...]
    last: tuple[Rule, ...]
    head: tuple[Rule, ...]
    head_axes: int = 2


NAMES = {
    "big_transfer": BitNames(
        root=(Rule("resnet/root_block/standardized_conv2d/kernel", "convolution.weight", channels_first),),
        unit_name="resnet/block{}/unit{:02d}/",
        unit=tuple(
            rule
            for number, letter in enumerate("abc", 1)
            for rule in (
                *_big_transfer_norm(f"{letter}/", f"norm{number}"),
                Rule(f"{letter}/standardized_conv2d/kernel", f"conv{number}.weight", channels_first),
            )
        ),
        projection=(Rule("a/proj/standardized_conv2d/kernel", "downsample.conv.weight", channels_first),),
        last=_big_transfer_norm("resnet/", "norm"),
        head=(
            Rule("resnet/head/conv2d/kernel", "classifier.weight", _one_by_one),
            Rule("resnet/head/conv2d/bias", "classifier.bias", as_is),
        ),
        head_axes=4,
    ),
    "bit_paper": BitNames(
        root=(Rule("root_block/conv_root/kernel", "convolution.weight", channels_first),),
        unit_name="block{}/unit{:02d}/",
        unit=RESNET_UNIT,
        projection=RESNET_PROJECTION[:1],  # without a norm
        last=norm("norm-pre-head", "norm", flatten),
        head=HEAD,
    ),
    "bit": BitNames(
        root=RESNET_ROOT,
        unit_name="block{}/unit{}/",
        unit=RESNET_UNIT,
        projection=RESNET_PROJECTION,
        last=(),
        head=HEAD,
    ),
}


def rules_for(config: HfBiTConfig, has_head: bool, names: BitNames) -> list[Rule]:
    """Return the rules of all arrays of a classifier or a bare network, with the names of one code."""
    base = "bit." if has_head else ""
    resnet = f"{base}resnet."
    return table(
        [
            ("", resnet, names.root),
            *resnet_units(config.depths, names.unit_name, 1, resnet, names.unit, names.projection),
            ("", base, names.last),
            ("", "", names.head if has_head else ()),
        ]
    )
