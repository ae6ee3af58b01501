"""Every family of the original repositories: converted (or its image tower), refused by name, or a size is requested.

Trees of arrays at full size, names and shapes alone, are what the original classes initialize
(goldens_peers/make_trees.py).
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_vit.conversion import ConversionError
from hf_vit.conversion.checkpoint import Checkpoint
from hf_vit.conversion.recognition import recognize
from hf_vit.conversion.source import ConvertOptions

from ..paths import PEERS
from .test_bit import as_big_transfer

B, L, H, S, TI = (768, 12, 12), (1024, 24, 16), (1280, 32, 16), (384, 12, 6), (192, 12, 3)  # width, depth, heads
# from big_vision's models/vit.py
SO400M, G_OPT = (1152, 27, 16), (1536, 40, 16)
# Full-size trees: width, depth and heads, and other fields of the configuration.
RIGHT = {
    "vit_jax B/16": (B, {"patch_size": 16, "pooling": "cls", "representation_size": 768, "num_labels": 21843}),
    "vit_jax H/14": (H, {"patch_size": 14, "pooling": "cls", "representation_size": 1280, "image_size": 224}),
    "vit_jax R50+B/16": (B, {"patch_size": 1, "stem_depths": [3, 4, 9], "stem_width": 64, "image_size": 224}),
    "vit_jax B/16 fine-tuned": (B, {"patch_size": 16, "representation_size": None, "image_size": 384}),
    "AugReg Ti/16": (TI, {"patch_size": 16, "pooling": "cls", "representation_size": None, "image_size": 224}),
    "AugReg R26+S/32": (S, {"patch_size": 1, "stem_depths": [2, 2, 2, 2], "pooling": "cls", "image_size": 224}),
    "AugReg R+Ti/16": (TI, {"patch_size": 8, "stem_depths": [], "pooling": "cls", "image_size": 224}),
    "SAM B/16": (B, {"patch_size": 16, "pooling": "cls", "representation_size": 768, "num_labels": 1000}),
    "GSAM B/16": (B, {"patch_size": 16, "pooling": "mean", "use_cls_token": False, "representation_size": None}),
    "plain S/16": (S, {"patch_size": 16, "pooling": "mean", "position_embedding_type": "sincos2d", "num_labels": 1000}),
    "DeiT III B/16": (B, {"patch_size": 16, "pooling": "cls", "use_cls_token": True, "image_size": 384}),
    "SigLIP B/16": (B, {"patch_size": 16, "pooling": "map", "image_size": 256, "projection_dim": None}),
    "SigLIP So400m/14": (SO400M, {"patch_size": 14, "pooling": "map", "intermediate_size": 4304, "image_size": 378}),
    "SigLIP 2 g-opt/16": (G_OPT, {"patch_size": 16, "pooling": "map", "intermediate_size": 6144, "image_size": 384}),
    "SigLIP 2 NaFlex B/16": (B, {"patch_size": 16, "pooling": "map", "image_size": 256, "projection_dim": None}),
    "LiT B16B": (B, {"patch_size": 16, "pooling": "cls", "projection_dim": 768, "image_size": 224}),
    "LiT L16S": (L, {"patch_size": 16, "pooling": "cls", "projection_dim": None, "image_size": 224}),
    "LiT of big_vision B/16": (B, {"patch_size": 16, "pooling": "cls", "projection_dim": 768, "image_size": 224}),
    "CLIPPO B/16": (B, {"patch_size": 16, "pooling": "map", "projection_dim": 768, "image_size": 224}),
    "PaliGemma 3B": (SO400M, {"patch_size": 14, "pooling": "none", "projection_dim": 2048, "image_size": 224}),
    "PaliGemma 2 3B": (SO400M, {"patch_size": 14, "pooling": "none", "projection_dim": 2304, "image_size": 448}),
}
RESNETS = {
    "BiT R152x2": {"depths": [3, 8, 36, 3], "embedding_size": 128, "num_labels": 1000},
    "BiT R101x3": {"depths": [3, 4, 23, 3], "embedding_size": 192, "num_labels": 397},
}
ASKS = {"FlexiViT-B": "patch_size=16"}
REFUSED = {
    "MLP-Mixer B/16": "MLP-Mixer",
    "UViM stage I": "UViM",
    "UViM stage II": "UViM",
    "GIVT": "GIVT",
    "GIVT of images": "GIVT",
    "VAE of GIVT (convolutions)": "GIVT",
    "VAE of GIVT (ViT)": "GIVT",
    "VQ-VAE of PaliGemma": "PaliGemma",
    "CapPa B/16": "CapPa",
    "Jet": "Jet",
    "JetFormer": "JetFormer",
    "text tower": "text tower",
    "language model": "language model",
    "ResNet of Flax": "ResNet",
}
# Modules of a block, in the released files of vit_jax; present-day Flax numbers them by class.
BY_POSITION = {
    "LayerNorm_1": "LayerNorm_2",
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "MlpBlock_0": "MlpBlock_3",
}
BY_HAND = {  # no class of the repositories: names from segmentation.py's reader, gemma.py's parameters, Flax's example
    "VQ-VAE of PaliGemma": {"_vq_vae._embedding": [128, 512], "decoder.0.weight": [512, 512, 1, 1]},
    "language model": {"params/llm/embedder/input_embedding": [257152, 2048]},
    "ResNet of Flax": {"params/conv_init/kernel": [7, 7, 3, 64], "batch_stats/bn_init/mean": [64]},
}


TREES = json.loads((PEERS / "trees.json").read_text()) | BY_HAND


def shapes_in(tree: str) -> dict[str, tuple[int, ...]]:
    """Expand a tree: names and shapes of every block."""
    shapes = {}
    for name, shape in TREES[tree].items():
        count = re.search(r"\{(\d+)\}", name)
        for number in range(int(count[1]) if count else 1):
            shapes[name.replace(count[0], str(number)) if count else name] = tuple(shape)
    return shapes


def test_every_tree_is_here():
    assert set(TREES) == {*RIGHT, *RESNETS, *ASKS, *REFUSED}


def model_of(shapes: dict[str, tuple[int, ...]]):
    """Convert a file without its values: all checks of a conversion except that of values."""
    dtypes, request = dict.fromkeys(shapes, "float32"), ConvertOptions(without_weights=True)
    path = Path("x.npz")
    checkpoint = Checkpoint(path.name, path, {}, shapes, dtypes, "", lambda name: torch.ones(1).expand(shapes[name]))
    source, naming = recognize(checkpoint, request)
    model, _, _ = source.read(checkpoint, naming, request)
    return model


@pytest.mark.parametrize("tree", RIGHT)
def test_a_full_size_tree_is_recognized_as_its_variant(tree):
    (width, depth, heads), others = RIGHT[tree]
    expected = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads, **others}
    config = model_of(shapes_in(tree)).config
    found = {name: getattr(config, name) for name in expected}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()} == expected


@pytest.mark.parametrize(("tree", "message"), [*ASKS.items(), *REFUSED.items()])
def test_a_tree_that_is_refused_or_needs_a_patch_size(tree, message):
    with pytest.raises(ConversionError, match=message):
        model_of(shapes_in(tree))


@pytest.mark.parametrize("tree", ["LiT B16B", "LiT L16S"])
def test_a_lit_file_may_number_its_modules_by_position(tree):
    released = {}
    for name, shape in shapes_in(tree).items():
        block = re.match(r"(img/Transformer/encoderblock_\d+/)(\w+)(/.*)", name)
        released["".join((block[1], BY_POSITION.get(block[2], block[2]), block[3])) if block else name] = shape
    assert model_of(released).config == model_of(shapes_in(tree)).config


@pytest.mark.parametrize("layout", ["bit_paper", "big_transfer"])
@pytest.mark.parametrize("tree", RESNETS)
def test_a_full_size_resnet_is_recognized_as_its_variant(tree, layout):
    """With the names of bit_paper.py, and with those of gs://bit_models, which have no original class."""
    shapes = shapes_in(tree)
    if layout == "big_transfer":
        arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
        shapes = {name: array.shape for name, array in as_big_transfer(arrays).items()}
    config = model_of(shapes).config
    assert {name: getattr(config, name) for name in RESNETS[tree]} == RESNETS[tree]
