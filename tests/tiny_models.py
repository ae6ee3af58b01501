"""Tiny models that tests share. No two sizes of one are equal, so that a swapped axis cannot pass."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoModelForImageClassification, BitConfig, BitForImageClassification

from hf_vit import (
    HfBiTConfig,
    HfBiTForImageClassification,
    HfViTConfig,
    HfViTForImageClassification,
    HfViTHybridConfig,
    HfViTImageProcessor,
    quantize,
)
from hf_vit.loading import load, save_folder

SIZES = {"hidden_size": 14, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 22}
TINY = {**SIZES, "image_size": (20, 36), "patch_size": (4, 6), "num_labels": 11}
TINY_HYBRID = {**TINY, "patch_size": (1, 2), "image_size": (24, 48), "stem_depths": [1, 2], "stem_width": 32}
TINY_BIT = {"embedding_size": 32, "depths": [1, 2], "num_labels": 7, "image_size": (43, 64)}
BIT_PIXELS = torch.randn(2, 3, 43, 64, generator=torch.Generator().manual_seed(1))

VARIANTS = {  # arguments of `tiny`, by name
    "cls": {},
    "mean": {"pooling": "mean"},
    "map": {"pooling": "map", "representation_size": 9},
    "none": {"pooling": "none", "use_cls_token": True},
    "sincos": {"pooling": "mean", "position_embedding_type": "sincos2d", "hidden_size": 16},
    "no position of the class token": {"no_embed_class": True},
    "no positions": {"position_embedding_type": "none", "qkv_bias": False, "representation_size": 14},
    "learned2d": {"position_embedding_type": "learned2d"},
    "every layer": {"position_embedding_placement": "every_layer"},
    "shared by layers": {
        "position_embedding_type": "learned2d",
        "position_embedding_placement": "every_layer_shared",
        "pooling": "mean",
    },
    "relative": {"position_embedding_type": "relative"},
    "axial": {"attention_axes": "axial", "pooling": "mean", "num_hidden_layers": 4},
    "hybrid": {"hybrid": True},
    "stem alone": {"hybrid": True, "stem_depths": [], "pooling": "mean"},
}


def load_model(name, **settings):
    """The model of a folder, without its image processor."""
    return load(name, **settings)[0]


def tiny(hybrid: bool = False, seed: int = 0, **fields) -> HfViTForImageClassification:
    """A classifier in which no parameter is zero or one, so that every one counts."""
    torch.manual_seed(seed)
    config = HfViTHybridConfig(**{**TINY_HYBRID, **fields}) if hybrid else HfViTConfig(**{**TINY, **fields})
    model = AutoModelForImageClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_bit(model_class=HfBiTForImageClassification, **fields):
    """A ResNet in which no parameter is zero or one."""
    return randomize(model_class(HfBiTConfig(**{**TINY_BIT, **fields})), mean=0.1)


def their_bit(model_class=BitForImageClassification, **changes):
    """A ResNet of transformers in which no parameter is zero or one."""
    sizes = {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [1, 2], "num_labels": 7}
    return randomize(model_class(BitConfig(**sizes, **changes)), mean=0.1)


# In the definitions of BitConfig, padding as TensorFlow's
SAME_PADDING = {"global_padding": "SAME", "embedding_dynamic_padding": True}


def randomize(model: nn.Module, mean: float = 0.0, std: float = 0.3) -> nn.Module:
    """Draw every parameter, also those that a new model has at zero or one."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean, std)
    return model.eval()


def images(model, batch: int = 2) -> torch.Tensor:
    """(batch, 3, height, width) of the size that the model was made for."""
    torch.manual_seed(5)
    return torch.randn(batch, 3, *model.config.image_size)


def save_tiny(folder: Path, seed: int = 0, **fields) -> Path:
    """Write a folder with a classifier that tells images apart and its image processor; return the folder."""
    model = tiny(seed=seed, **fields)
    nn.init.normal_(model.classifier.weight)
    height, width = model.config.image_size
    save_folder(folder, model, HfViTImageProcessor(size={"height": height, "width": width}))
    return folder


# Fields that no configuration has: of any type, called as a method or as what transformers reads of language models
UNKNOWN_FIELDS = {
    "added_by_a_tool": {"dtype": "float32", "nested": {"deep": None}},
    "_private": 1.5,
}


OUTLIERS = "vit.layers.1.mlp.fc2"  # the layer of `save_quantized` whose inputs have outliers


def write_images(folder: Path, count: int = 16) -> Path:
    """Write random images of 24 x 40 pixels; return the folder."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(generator.integers(0, 255, (24, 40, 3), np.uint8)).save(folder / f"{number:02}.png")
    return folder


def save_quantized(root: Path) -> Path:
    """Save a classifier, of whose 1500 hidden units one is always 60, images, and the quantized classifier.

    Returns:
        `root`/int8, the quantized classifier; the others are `root`/float and `root`/images.
    """
    folder = save_tiny(root / "float", intermediate_size=1500)
    model = HfViTForImageClassification.from_pretrained(folder)
    with torch.no_grad():
        model.get_submodule(OUTLIERS.replace("fc2", "fc1")).bias[0] = 60
    model.save_pretrained(folder)
    (folder / "calibration.json").write_text("{}")
    write_images(root / "images" / "LABEL_3")
    quantize(folder, root / "int8", [root / "images"], min_agreement=0)
    return root / "int8"
