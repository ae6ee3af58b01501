"""Rules of timm's Vision Transformers and hybrids, also for DeiT, MAE and DINO.

Names are those of timm 1.0 (timm/models/vision_transformer.py, vision_transformer_hybrid.py, resnetv2.py);
`pre_logits.fc` is from timm before 0.6.
"""

from collections.abc import Iterator

from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from ..rules import Block, Rule, as_is, part, resnet_units, table, weight_and_bias

POSITIONS = "pos_embed"
UNIT_NAME = "stages.{}.blocks.{}."  # name of a ResNet's unit


def _fused(theirs: str, ours: str, projections: tuple[str, ...], bias: bool = True) -> Iterator[Rule]:
    for index, projection in enumerate(projections):
        rules = weight_and_bias(theirs, f"{ours}{projection}", part(index, len(projections)))
        yield from rules if bias else rules[:1]


def _encoder_block(qkv_bias: bool) -> tuple[Rule, ...]:
    return (
        *weight_and_bias("norm1", "layernorm_before"),
        *_fused("attn.qkv", "attention.", ("q_proj", "k_proj", "v_proj"), qkv_bias),
        *weight_and_bias("attn.proj", "attention.o_proj"),
        *weight_and_bias("norm2", "layernorm_after"),
        *weight_and_bias("mlp.fc1", "mlp.fc1"),
        *weight_and_bias("mlp.fc2", "mlp.fc2"),
    )


_MAP_HEAD = (
    Rule("latent", "probe", as_is),
    *weight_and_bias("q", "q_proj"),
    *_fused("kv", "", ("k_proj", "v_proj")),
    *weight_and_bias("proj", "o_proj"),
    *weight_and_bias("norm", "layernorm"),
    *weight_and_bias("mlp.fc1", "mlp.fc1"),
    *weight_and_bias("mlp.fc2", "mlp.fc2"),
)
_RESNET_ROOT = (Rule("conv.weight", "convolution.weight", as_is), *weight_and_bias("norm", "norm"))
RESNET_UNIT = tuple(
    rule
    for number in (1, 2, 3)
    for rule in (
        Rule(f"conv{number}.weight", f"conv{number}.weight", as_is),
        *weight_and_bias(f"norm{number}", f"norm{number}"),
    )
)
RESNET_PROJECTION = (
    Rule("downsample.conv.weight", "downsample.conv.weight", as_is),
    *weight_and_bias("downsample.norm", "downsample.norm"),
)


def rules_for(config: HfViTConfig, has_head: bool) -> list[Rule]:
    """Return the rules of all arrays of a classifier or a bare encoder, with timm's names."""
    base = "vit." if has_head else ""
    blocks: list[Block] = []
    if isinstance(config, HfViTHybridConfig):
        theirs, ours, depths = "patch_embed.backbone.", f"{base}embeddings.stem.", config.stem_depths
        blocks.append((f"{theirs}stem." if depths else theirs, ours, _RESNET_ROOT))
        blocks += resnet_units(depths, theirs + UNIT_NAME, 0, ours, RESNET_UNIT, RESNET_PROJECTION)
    blocks.append(("", f"{base}embeddings.", _embeddings(config)))
    for index in range(config.num_hidden_layers):
        blocks.append((f"blocks.{index}.", f"{base}layers.{index}.", _encoder_block(config.qkv_bias)))
    blocks.append(("", base, weight_and_bias("fc_norm" if config.norm_after_pooling else "norm", "layernorm")))
    if config.pooling == "map":
        blocks.append(("attn_pool.", f"{base}pooler.map.", _MAP_HEAD))
    if config.representation_size is not None:
        blocks.append(("", base, weight_and_bias("pre_logits.fc", "pooler.dense")))
    return table([*blocks, ("", "", weight_and_bias("head", "classifier") if has_head else ())])


def _embeddings(config: HfViTConfig) -> list[Rule]:
    rules = list(weight_and_bias("patch_embed.proj", "patch_embeddings.projection"))
    if config.use_cls_token:
        rules.append(Rule("cls_token", "cls_token", as_is))
    if config.position_embedding_type == "learned":
        rules.append(Rule(POSITIONS, "position_embeddings", as_is))
    return rules
