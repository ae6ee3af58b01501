"""Rules of the original JAX checkpoints: of ViTs with the names of the released vit_jax files, of BiT for each code."""

from collections.abc import Collection
from typing import Any, NamedTuple

from ...models.configuration_hf_bit import HfBiTConfig
from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from ..tables import (
    Block,
    Layout,
    Rule,
    as_is,
    channels_first,
    flatten,
    flatten_heads,
    merge_heads,
    resnet_units,
    split_heads,
    table,
    transpose,
)

POSITIONS = "Transformer/posembed_input/pos_embedding"


def norm(theirs: str, ours: str, layout: Layout = as_is) -> tuple[Rule, Rule]:
    """Make the rules of a LayerNorm; with a layout, of a GroupNorm."""
    return Rule(f"{theirs}/scale", f"{ours}.weight", layout), Rule(f"{theirs}/bias", f"{ours}.bias", layout)


def dense(theirs: str, ours: str) -> tuple[Rule, Rule]:
    """Make the rules of a linear layer."""
    return Rule(f"{theirs}/kernel", f"{ours}.weight", transpose), Rule(f"{theirs}/bias", f"{ours}.bias", as_is)


RESNET_ROOT = (
    Rule("conv_root/kernel", "convolution.weight", channels_first),
    *norm("gn_root", "norm", flatten),
)
RESNET_UNIT = tuple(
    rule
    for number in (1, 2, 3)
    for rule in (
        Rule(f"conv{number}/kernel", f"conv{number}.weight", channels_first),
        *norm(f"gn{number}", f"norm{number}", flatten),
    )
)
RESNET_PROJECTION = (
    Rule("conv_proj/kernel", "downsample.conv.weight", channels_first),
    *norm("gn_proj", "downsample.norm", flatten),
)
HEAD = dense("head", "classifier")
PROJECTION = dense("projection", "projection")


def vit_rules(config: HfViTConfig, has_head: bool) -> list[Rule]:
    """Return the rules of all arrays of a classifier or a bare encoder, with the names of the released files."""
    base, heads = "vit." if has_head else "", config.num_attention_heads
    blocks: list[Block] = []
    if isinstance(config, HfViTHybridConfig):
        stem = f"{base}embeddings.stem."
        blocks.append(("", stem, RESNET_ROOT))
        blocks += resnet_units(config.stem_depths, "block{}/unit{}/", 1, stem, RESNET_UNIT, RESNET_PROJECTION)
    blocks.append(("", f"{base}embeddings.", _embeddings(config)))
    for index in range(config.num_hidden_layers):
        blocks.append((f"Transformer/encoderblock_{index}/", f"{base}layers.{index}.", _encoder_block(heads)))
    blocks.append(("Transformer/", base, norm("encoder_norm", "layernorm")))
    if config.pooling == "map":
        blocks.append(("MAPHead_0/", f"{base}pooler.map.", _map_head(heads)))
    if config.representation_size is not None:
        blocks.append(("", base, dense("pre_logits", "pooler.dense")))
    if config.projection_dim is not None:
        blocks.append(("", base, PROJECTION))
    return table([*blocks, ("", "", HEAD if has_head else ())])


def with_flat_norms(rules: list[Rule]) -> list[Rule]:
    """Adapt rules to GroupNorm arrays of shape (channels,); released files have (1, 1, 1, channels)."""
    return [rule._replace(layout=as_is) if rule.layout is flatten else rule for rule in rules]


def _embeddings(config: HfViTConfig) -> list[Rule]:
    rules = [
        Rule("embedding/kernel", "patch_embeddings.projection.weight", channels_first),
        Rule("embedding/bias", "patch_embeddings.projection.bias", as_is),
    ]
    if config.use_cls_token:
        rules.append(Rule("cls", "cls_token", as_is))
    if config.position_embedding_type == "learned":
        rules.append(Rule(POSITIONS, "position_embeddings", as_is))
    return rules


def _encoder_block(heads: int) -> tuple[Rule, ...]:
    return (
        *norm("LayerNorm_0", "layernorm_before"),
        *_attention("MultiHeadDotProductAttention_1", "attention.", heads),
        *norm("LayerNorm_2", "layernorm_after"),
        *dense("MlpBlock_3/Dense_0", "mlp.fc1"),
        *dense("MlpBlock_3/Dense_1", "mlp.fc2"),
    )


def _map_head(heads: int) -> tuple[Rule, ...]:
    return (
        Rule("probe", "probe", as_is),
        *_attention("MultiHeadDotProductAttention_0", "", heads),
        *norm("LayerNorm_0", "layernorm"),
        *dense("MlpBlock_0/Dense_0", "mlp.fc1"),
        *dense("MlpBlock_0/Dense_1", "mlp.fc2"),
    )


def _attention(theirs: str, ours: str, heads: int) -> list[Rule]:
    rules = []
    for their_name, our_name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        rules.append(Rule(f"{theirs}/{their_name}/kernel", f"{ours}{our_name}.weight", split_heads(heads)))
        rules.append(Rule(f"{theirs}/{their_name}/bias", f"{ours}{our_name}.bias", flatten_heads(heads)))
    rules.append(Rule(f"{theirs}/out/kernel", f"{ours}o_proj.weight", merge_heads(heads)))
    rules.append(Rule(f"{theirs}/out/bias", f"{ours}o_proj.bias", as_is))
    return rules


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


BIT_NAMES = {
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


def bit_rules(config: HfBiTConfig, has_head: bool, names: BitNames) -> list[Rule]:
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


def original_rules(config: Any, with_head: bool, names: Collection[str]) -> list[Rule]:
    """Return the rules of a model's parameters, with the names of the released files, sorted by them.

    Parameters that no released file has (relative positions, the decoder of masked patches) keep name and layout.
    """
    if isinstance(config, HfBiTConfig):
        code = "bit" if config.layer_type == "bottleneck" else "big_transfer"
        rules = bit_rules(config, with_head, BIT_NAMES[code])
    else:
        rules = vit_rules(config, with_head)
    rules = [rule for rule in rules if rule.ours in names]
    others = set(names) - {rule.ours for rule in rules}
    return sorted([*rules, *(Rule(name, name, as_is) for name in others)])
