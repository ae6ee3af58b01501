"""A quantized model that tests share: the fixture `quantized` of conftest.py."""

import numpy as np
import torch
from PIL import Image

from hf_vit import HfViTForImageClassification, quantize

from .tiny_models import save_tiny

OUTLIERS = "vit.layers.1.mlp.fc2"  # the only layer whose inputs are made to have them


def write_images(folder, count=16):
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(generator.integers(0, 255, (24, 40, 3), np.uint8)).save(folder / f"{number:02}.png")
    return folder


def write_quantized(place):
    """Write a classifier, one of whose 1500 hidden units is 60 everywhere, images, and the quantized classifier.

    Returns:
        The quantized folder `place`/int8; the others are float and images beside it.
    """
    folder = save_tiny(place / "float", intermediate_size=1500)
    model = HfViTForImageClassification.from_pretrained(folder)
    with torch.no_grad():
        model.get_submodule(OUTLIERS.replace("fc2", "fc1")).bias[0] = 60
    model.save_pretrained(folder)
    write_images(place / "images" / "LABEL_3")
    quantize(folder, place / "int8", [place / "images"], min_agreement=0)
    return place / "int8"
