"""A tiny model, and small folders of images that it can distinguish."""

import numpy as np
import pytest

from ..photographs import draw_picture
from ..tiny_models import save_tiny

COLORS = {"blue": (30, 60, 220), "green": (40, 200, 50), "red": (220, 40, 40)}


@pytest.fixture(autouse=True)
def _fresh_accelerator(fresh_accelerator):
    """Reset Accelerate's state, so that every test can run an evaluation in this process."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model with a pre-logits layer of 10."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", patch_size=4, representation_size=10)


@pytest.fixture(scope="session")
def colors(tmp_path_factory):
    """Images of three colors: 7, 9 and 8 for training, 5 each for testing; one red test image is broken."""
    root, rng = tmp_path_factory.mktemp("colors"), np.random.default_rng(0)
    for split, counts in (("train", (7, 9, 8)), ("test", (5, 5, 5))):
        for (name, color), count in zip(COLORS.items(), counts, strict=True):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                draw_picture(color, rng).save(root / split / name / f"{number}.png")
    (root / "test" / "red" / "3.png").write_bytes(b"this is no picture")
    return root
