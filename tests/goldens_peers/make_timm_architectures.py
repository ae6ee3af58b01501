"""Write hf_vit/conversion/timm_architectures.csv: what the name of an architecture of timm states.

    python tests/goldens_peers/make_timm_architectures.py     (with timm 1.0.31 and torchvision; on the meta device)

A row holds what no array of a checkpoint shows, and the width to which it belongs: heads, activation, epsilon, image
size, pooling, and whether the table of positions has a row for the class token. Or it holds what the architecture has
that hf_vit lacks.
"""

import csv
from pathlib import Path

import timm
import torch
from timm.models import resnetv2
from torch import nn

TABLE = Path(__file__).parents[2] / "hf_vit" / "conversion" / "timm_architectures.csv"
FIELDS = ("architecture", "width", "heads", "activation", "epsilon", "image_size", "pooling", "positions", "lacks")
ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu", "ReLU": "relu"}
BLOCKS = {
    "ResPostBlock": "a norm after attention and MLP (residual post-norm)",
    "ParallelScalingBlock": "attention and MLP in parallel",
    "ParallelThingsBlock": "several attentions and MLPs in parallel",
    "DiffParallelScalingBlock": "differential attention",
}
BIT = ("resnetv2_50x1_bit", "resnetv2_50x3_bit", "resnetv2_101x1_bit", "resnetv2_101x3_bit", "resnetv2_152x2_bit")
BIT += ("resnetv2_152x4_bit",)


def missing_in_hf_vit(model: nn.Module) -> str:
    """Return what a ViT of timm has that hf_vit lacks; "" if nothing."""
    if hasattr(model, "dist_token"):
        return "a distillation token"
    block = model.blocks[0]
    if type(block).__name__ in BLOCKS:
        return BLOCKS[type(block).__name__]
    attention = type(block.attn).__name__
    if attention != "Attention":
        return "differential attention"
    if type(block.mlp).__name__ != "Mlp":
        return f"a gated MLP ({type(block.mlp).__name__})"
    if type(block.norm1).__name__ != "LayerNorm":
        return f"{type(block.norm1).__name__} in place of LayerNorm"
    if model.num_reg_tokens:
        return f"{model.num_reg_tokens} register tokens"
    if not isinstance(model.norm_pre, nn.Identity):
        return "a LayerNorm before the blocks"
    inner = (block.attn.q_norm, block.attn.norm, block.mlp.norm)
    if not all(isinstance(module, nn.Identity) for module in inner):
        return "a norm inside attention or MLP"
    if any(isinstance(module, nn.BatchNorm2d) for module in model.patch_embed.modules()):
        return "a ResNet with batch normalization"
    if isinstance(model.norm, nn.Identity) and isinstance(model.fc_norm, nn.Identity):
        return "no LayerNorm after the blocks"
    return ""


def describe(name: str) -> dict[str, object]:
    with torch.device("meta"):
        model = timm.create_model(name)
    row: dict[str, object] = dict.fromkeys(FIELDS, "") | {"architecture": name}
    if isinstance(model, resnetv2.ResNetV2):
        return row | {"lacks": "" if name in BIT else "another norm or stem than BiT"}
    if lacks := missing_in_hf_vit(model):
        return row | {"lacks": lacks}
    block = model.blocks[0]
    height, width = model.patch_embed.img_size
    assert height == width
    return row | {
        "width": model.embed_dim,
        "heads": block.attn.num_heads,
        "activation": ACTIVATIONS[type(block.mlp.act).__name__],
        "epsilon": block.norm1.eps,
        "image_size": height,
        "pooling": model.global_pool,
        "positions": "patches" if model.no_embed_class or not model.num_prefix_tokens else "all",
    }


if __name__ == "__main__":
    modules = ("vision_transformer", "deit", "vision_transformer_hybrid", "resnetv2")
    names = sorted(name for module in modules for name in timm.list_models(module=module))
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(describe, names))
