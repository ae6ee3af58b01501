"""A tiny model and small folders of images that it can tell apart."""

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from PIL import Image

from hf_vit.images.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.modeling_hf_vit import HfViTForImageClassification

COLORS = {"blue": (30, 60, 220), "green": (40, 200, 50), "red": (220, 40, 40)}
TINY = {
    "hidden_size": 14,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 22,
    "image_size": [20, 36],
    "patch_size": 4,
}


@pytest.fixture(autouse=True)
def _fresh_accelerator(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def arguments(**settings) -> list[str]:
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def save_tiny(folder, **config):
    torch.manual_seed(0)
    model = HfViTForImageClassification(HfViTConfig(**{**TINY, "num_labels": 11, **config}))
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(folder)
    HfViTImageProcessor(size={"height": 20, "width": 36}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model with a pre-logits layer of 10."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), representation_size=10)


def picture(color, rng) -> Image.Image:
    pixels = np.clip(np.array(color) + rng.integers(-25, 25, (6, 9, 3)), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture(scope="session")
def colors(tmp_path_factory):
    """Pictures of three colours: 7, 9 and 8 to learn from, 5 each to measure on, of which one red one is broken."""
    root, rng = tmp_path_factory.mktemp("colors"), np.random.default_rng(0)
    for split, counts in (("train", (7, 9, 8)), ("test", (5, 5, 5))):
        for (name, color), count in zip(COLORS.items(), counts, strict=True):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                picture(color, rng).save(root / split / name / f"{number}.png")
    (root / "test" / "red" / "3.png").write_bytes(b"this is no picture")
    return root
