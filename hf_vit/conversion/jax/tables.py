"""Tables of the original JAX checkpoints: ViTs with the names of the released vit_jax files, BiT for each code."""

import hashlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from ...models.configuration_hf_bit import HfBiTConfig
from ..tables import (
    Layout,
    Rule,
    as_is,
    channels_first,
    expand,
    flatten,
    flatten_heads,
    merge_heads,
    split_heads,
    transpose,
    within,
)

POSITIONS = "Transformer/posembed_input/pos_embedding"


def norm(theirs: str, ours: str, layout: Layout = as_is) -> tuple[Rule, Rule]:
    """Make the rules of a LayerNorm; with a layout, of a GroupNorm."""
    return Rule(f"{theirs}/scale", f"{ours}.weight", layout), Rule(f"{theirs}/bias", f"{ours}.bias", layout)


def dense(theirs: str, ours: str) -> tuple[Rule, Rule]:
    """Make the rules of a linear layer."""
    return Rule(f"{theirs}/kernel", f"{ours}.weight", transpose), Rule(f"{theirs}/bias", f"{ours}.bias", as_is)


def _attention(theirs: str, ours: str, heads: int) -> list[Rule]:
    rules = [
        Rule(f"{theirs}/out/kernel", f"{ours}o_proj.weight", merge_heads(heads)),
        Rule(f"{theirs}/out/bias", f"{ours}o_proj.bias", as_is),
    ]
    for their_name, our_name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        rules.append(Rule(f"{theirs}/{their_name}/kernel", f"{ours}{our_name}.weight", split_heads(heads)))
        rules.append(Rule(f"{theirs}/{their_name}/bias", f"{ours}{our_name}.bias", flatten_heads(heads)))
    return rules


def _convolution(theirs: str, ours: str) -> Rule:
    return Rule(f"{theirs}/kernel", f"{ours}.weight", channels_first)


_RESNET_ROOT = (_convolution("conv_root", "convolution"), *norm("gn_root", "norm", flatten))
_RESNET_UNIT = (
    *(_convolution(f"conv{number}", f"conv{number}") for number in (1, 2, 3)),
    *(rule for number in (1, 2, 3) for rule in norm(f"gn{number}", f"norm{number}", flatten)),
    _convolution("conv_proj", "downsample.conv"),
    *norm("gn_proj", "downsample.norm", flatten),
)
_HEAD = dense("head", "classifier")


def vit_table(config: Any) -> list[Rule]:
    """Return the table of ViTs and hybrids."""
    heads, stem = config.num_attention_heads, "embeddings.stem."
    encoder_block = (
        *norm("LayerNorm_0", "layernorm_before"),
        *_attention("MultiHeadDotProductAttention_1", "attention.", heads),
        *norm("LayerNorm_2", "layernorm_after"),
        *dense("MlpBlock_3/Dense_0", "mlp.fc1"),
        *dense("MlpBlock_3/Dense_1", "mlp.fc2"),
    )
    map_head = (
        Rule("probe", "probe", as_is),
        *_attention("MultiHeadDotProductAttention_0", "", heads),
        *norm("LayerNorm_0", "layernorm"),
        *dense("MlpBlock_0/Dense_0", "mlp.fc1"),
        *dense("MlpBlock_0/Dense_1", "mlp.fc2"),
    )
    return [
        *within("", stem, _RESNET_ROOT),
        *within("block{+}/unit{+}/", f"{stem}stages.{{}}.layers.{{}}.", _RESNET_UNIT),
        Rule("embedding/kernel", "embeddings.patch_embeddings.projection.weight", channels_first),
        Rule("embedding/bias", "embeddings.patch_embeddings.projection.bias", as_is),
        Rule("cls", "embeddings.cls_token", as_is),
        Rule(POSITIONS, "embeddings.position_embeddings", as_is),
        *within("Transformer/encoderblock_{}/", "layers.{}.", encoder_block),
        *norm("Transformer/encoder_norm", "layernorm"),
        *within("MAPHead_0/", "pooler.map.", map_head),
        *dense("pre_logits", "pooler.dense"),
        *dense("projection", "projection"),
        *_HEAD,
    ]


def with_flat_norms(rules: list[Rule]) -> list[Rule]:
    """Adapt rules to GroupNorm arrays of shape (channels,); released files have (1, 1, 1, channels)."""
    return [rule._replace(layout=as_is) if rule.layout is flatten else rule for rule in rules]


_one_by_one = Layout(  # (1, 1, in, out) -> (out, in): big_transfer's head is a convolution
    lambda kernel: kernel.flatten(0, 2).transpose(0, 1), lambda weight: weight.T[None, None]
)
_vector = Layout(flatten.to_ours, as_is.to_theirs)


def _big_transfer_norm(theirs: str, ours: str) -> tuple[Rule, Rule]:
    return (
        Rule(f"{theirs}group_norm/gamma", f"{ours}.weight", _vector),
        Rule(f"{theirs}group_norm/beta", f"{ours}.bias", _vector),
    )


_UNITS = "resnet.stages.{}.layers.{}."
_BIG_TRANSFER_UNIT = (
    *(_convolution(f"{letter}/standardized_conv2d", f"conv{number}") for number, letter in enumerate("abc", 1)),
    *(rule for number, letter in enumerate("abc", 1) for rule in _big_transfer_norm(f"{letter}/", f"norm{number}")),
    _convolution("a/proj/standardized_conv2d", "downsample.conv"),
)
# Tables of the codes of BiT. The first array is the root convolution, whose name identifies the code; the last two are
# the head's weight and bias.
BIT_TABLES = {
    "big_transfer": [
        _convolution("resnet/root_block/standardized_conv2d", "resnet.convolution"),
        *within("resnet/block{+}/unit{+02}/", _UNITS, _BIG_TRANSFER_UNIT),
        *_big_transfer_norm("resnet/", "norm"),
        Rule("resnet/head/conv2d/kernel", "classifier.weight", _one_by_one),
        Rule("resnet/head/conv2d/bias", "classifier.bias", as_is),
    ],
    "bit_paper": [
        _convolution("root_block/conv_root", "resnet.convolution"),
        *within("block{+}/unit{+02}/", _UNITS, _RESNET_UNIT),
        *norm("norm-pre-head", "norm", flatten),
        *_HEAD,
    ],
    "bit": [*within("", "resnet.", _RESNET_ROOT), *within("block{+}/unit{+}/", _UNITS, _RESNET_UNIT), *_HEAD],
}


def original_arrays(
    config: Any, names: Collection[str], read: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, array) of a model in the layout of the released files, sorted by name.

    Parameters that no released file has (relative positions, the decoder of masked patches) keep name and layout.

    Args:
        names: our names of the parameters.
        read: function that returns a parameter by our name.
    """
    if isinstance(config, HfBiTConfig):
        table = BIT_TABLES["bit" if config.layer_type == "bottleneck" else "big_transfer"]
    else:
        table = vit_table(config)
    rules = expand(table, names)
    others = set(names) - {rule.ours for rule in rules}
    for theirs, ours, layout in sorted([*rules, *(Rule(name, name, as_is) for name in others)]):
        yield theirs, layout.to_theirs(read(ours).detach())


def fingerprint_of(config: Any, names: Collection[str], read: Callable[[str], torch.Tensor]) -> str:
    """Return the SHA-256 of the lines `<sha256 of the bytes>  <dtype>  <shape>  <name>` of `original_arrays`.

    Bytes are those of a little-endian, C-ordered float32 array: a conversion widens half precision, without loss.
    """
    lines = hashlib.sha256()
    for name, tensor in original_arrays(config, names, read):
        array = tensor.float().contiguous().numpy()
        shape = "x".join(map(str, array.shape))
        lines.update(f"{hashlib.sha256(array.data).hexdigest()}  {array.dtype}  {shape}  {name}\n".encode())
    return lines.hexdigest()
