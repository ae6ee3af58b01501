"""The layout of the original JAX checkpoints: which arrays a model has, and what the dialects call them.

The rules speak the names of the released vit_jax files. Modules in a block of such a file are numbered by position
(LayerNorm_0, MultiHeadDotProductAttention_1, LayerNorm_2, MlpBlock_3); present-day Flax, and so big_vision, numbers
them per class.
"""

import re
from typing import NamedTuple

from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from ..rules import ConversionError, Rule, as_is, channels_first, flatten, merge_heads, numbered, split_heads, transpose

POSITIONS = "Transformer/posembed_input/pos_embedding"


def norm(theirs: str, ours: str, layout=as_is) -> tuple[Rule, Rule]:
    return Rule(f"{theirs}/scale", f"{ours}.weight", layout), Rule(f"{theirs}/bias", f"{ours}.bias", layout)


def dense(theirs: str, ours: str) -> tuple[Rule, Rule]:
    return Rule(f"{theirs}/kernel", f"{ours}.weight", transpose), Rule(f"{theirs}/bias", f"{ours}.bias", as_is)


def attention(theirs: str, ours: str) -> tuple[Rule, ...]:
    rules = []
    for their_name, our_name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        rules.append(Rule(f"{theirs}/{their_name}/kernel", f"{ours}{our_name}.weight", split_heads))
        rules.append(Rule(f"{theirs}/{their_name}/bias", f"{ours}{our_name}.bias", flatten))
    rules.append(Rule(f"{theirs}/out/kernel", f"{ours}o_proj.weight", merge_heads))
    rules.append(Rule(f"{theirs}/out/bias", f"{ours}o_proj.bias", as_is))
    return tuple(rules)


PATCHES = (
    Rule("embedding/kernel", "embeddings.patch_embeddings.projection.weight", channels_first),
    Rule("embedding/bias", "embeddings.patch_embeddings.projection.bias", as_is),
)
ENCODER_BLOCK = (
    *norm("LayerNorm_0", "layernorm_before"),
    *attention("MultiHeadDotProductAttention_1", "attention."),
    *norm("LayerNorm_2", "layernorm_after"),
    *dense("MlpBlock_3/Dense_0", "mlp.fc1"),
    *dense("MlpBlock_3/Dense_1", "mlp.fc2"),
)
MAP_HEAD = (
    Rule("MAPHead_0/probe", "pooler.map.probe", as_is),
    *attention("MAPHead_0/MultiHeadDotProductAttention_0", "pooler.map."),
    *norm("MAPHead_0/LayerNorm_0", "pooler.map.layernorm"),
    *dense("MAPHead_0/MlpBlock_0/Dense_0", "pooler.map.mlp.fc1"),
    *dense("MAPHead_0/MlpBlock_0/Dense_1", "pooler.map.mlp.fc2"),
)
RESNET_ROOT = (
    Rule("conv_root/kernel", "embeddings.stem.convolution.weight", channels_first),
    *norm("gn_root", "embeddings.stem.norm", flatten),
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


def rules_for(config: HfViTConfig, has_head: bool) -> list[Rule]:
    """Every array of a model, in the names of the released vit_jax files and of `HfViTForImageClassification`."""
    rules: list[Rule] = []
    if isinstance(config, HfViTHybridConfig):
        rules += numbered(resnet_rules(config), "", "vit.")
    rules += numbered(PATCHES, "", "vit.")
    if config.use_cls_token:
        rules.append(Rule("cls", "vit.embeddings.cls_token", as_is))
    if config.position_embedding_type == "learned":
        rules.append(Rule(POSITIONS, "vit.embeddings.position_embeddings", as_is))
    for index in range(config.num_hidden_layers):
        rules += numbered(ENCODER_BLOCK, f"Transformer/encoderblock_{index}/", f"vit.layers.{index}.")
    rules += norm("Transformer/encoder_norm", "vit.layernorm")
    if config.pooling == "map":
        rules += numbered(MAP_HEAD, "", "vit.")
    if config.representation_size is not None:
        rules += dense("pre_logits", "vit.pooler.dense")
    return [*rules, *HEAD] if has_head else rules


def resnet_rules(config: HfViTHybridConfig) -> list[Rule]:
    rules = list(RESNET_ROOT)
    for stage, depth in enumerate(config.stem_depths):
        for unit in range(depth):
            theirs, ours = f"block{stage + 1}/unit{unit + 1}/", f"embeddings.stem.stages.{stage}.layers.{unit}."
            rules += numbered(RESNET_UNIT, theirs, ours)
            if unit == 0:
                rules += numbered(RESNET_PROJECTION, theirs, ours)
    return rules


class Dialect(NamedTuple):
    """What a file calls its arrays.

    names: "vit_jax" (released), "flax" (present-day numbering) or "big_vision" (the same, positions at the root).
    prefix: before every name: "", "params/", "params/img/", "opt/target/" ...
    stacked: whether the blocks are one array each, with a leading axis over depth.
    """

    names: str
    prefix: str = ""
    stacked: bool = False


class StoredArray(NamedTuple):
    """Where an array is found: its name in the file and, if blocks are stacked, the block's index."""

    name: str
    index: int | None = None


PREFIXES = ("params/img/", "opt/target/img/", "img/", "params/", "opt/target/", "")
PER_CLASS = {"LayerNorm_1": "LayerNorm_2", "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1"}
PER_CLASS["MlpBlock_0"] = "MlpBlock_3"
INLINED_MAP_HEAD = ("probe", "MlpBlock_0/", "MultiHeadDotProductAttention_0/", "LayerNorm_0/")


def recognise(names: list[str], depth_of_stack: int | None, file: str) -> tuple[Dialect, dict[str, StoredArray]]:
    """Translate the names of a file to those of the rules.

    Args:
        names: of all arrays in the file.
        depth_of_stack: length of the leading axis of `Transformer/encoderblock/...`, if there are such arrays.

    Returns:
        The dialect, and for every name of the rules the array that holds it. Arrays beside the prefix (an optimiser's,
        a text tower's) are not in it.

    Raises:
        ConversionError: the file holds another architecture.
    """
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}embedding/kernel" in names), None)
    if prefix is None:
        raise ConversionError(f"{file} holds {_other_architecture(names)}; hf_vit converts ViT, its hybrids and BiT")
    own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    positions_at_root = any(name in own for name in ("pos_embedding", "Transformer/pos_embedding"))
    per_class = any(re.match(r"Transformer/encoderblock(_\d+)?/MlpBlock_0/", name) for name in own)
    stacked = depth_of_stack is not None
    is_big_vision = positions_at_root or stacked or "MAPHead_0/probe" in own or "probe" in own
    arrays: dict[str, StoredArray] = {}
    for name in own:
        for canonical, index in _canonical(name, depth_of_stack):
            arrays[canonical] = StoredArray(prefix + name, index)
    if per_class and POSITIONS not in arrays:
        is_big_vision = True
    return Dialect("big_vision" if is_big_vision else "flax" if per_class else "vit_jax", prefix, stacked), arrays


def _canonical(name: str, depth: int | None) -> list[tuple[str, int | None]]:
    if name in ("pos_embedding", "Transformer/pos_embedding"):
        return [(POSITIONS, None)]
    if name.startswith(INLINED_MAP_HEAD):
        return [(f"MAPHead_0/{name}", None)]
    match = re.match(r"Transformer/encoderblock(_\d+)?/([^/]+)(/.*)", name)
    if match is None:
        return [(name, None)]
    number, module, rest = match.groups()
    module = PER_CLASS.get(module, module)
    if number is None and depth is not None:
        return [(f"Transformer/encoderblock_{index}/{module}{rest}", index) for index in range(depth)]
    return [(f"Transformer/encoderblock{number}/{module}{rest}", None)]


def _other_architecture(names: list[str]) -> str:
    roots = {part for name in names for part in name.split("/")[:3]}
    if any(root.startswith("MixerBlock_") for root in roots):
        return "an MLP-Mixer"
    if "txt" in roots or "Embed_0" in roots:
        return "a text tower"
    return f"an unknown architecture (arrays such as {', '.join(sorted(names)[:3])})"


def dialect_name(canonical: str, dialect: Dialect) -> str:
    """The name that a dialect gives to an array of the rules (of one block, where it stacks them)."""
    if dialect.names == "vit_jax":
        return dialect.prefix + canonical
    if dialect.names == "big_vision" and canonical == POSITIONS:
        return f"{dialect.prefix}pos_embedding"
    for per_class, released in PER_CLASS.items():
        if canonical.startswith("Transformer/encoderblock"):
            canonical = canonical.replace(f"/{released}/", f"/{per_class}/")
    return dialect.prefix + canonical
