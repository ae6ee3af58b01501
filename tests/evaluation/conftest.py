"""A tiny model, and small folders of images that it can distinguish."""

import pytest

from ..photographs import write_colors
from ..tiny_models import save_tiny


@pytest.fixture(autouse=True)
def _fresh_accelerator(fresh_accelerator):
    """Reset Accelerate's state, so that every test can run an evaluation in this process."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model with a pre-logits layer of 10."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", patch_size=4, representation_size=10)


@pytest.fixture(scope="session")
def colors(tmp_path_factory):
    """Images of three colors: 8 each for training, 5 each for testing; one red test image is broken."""
    root = write_colors(tmp_path_factory.mktemp("colors"), train=8, test=5)
    (root / "test" / "red" / "3.png").write_bytes(b"this is no picture")
    return root
