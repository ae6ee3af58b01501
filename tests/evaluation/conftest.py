"""Small folders of images that a tiny model can distinguish."""

import pytest

from ..photographs import write_colors


@pytest.fixture(autouse=True)
def _fresh_accelerator(fresh_accelerator):
    """Reset Accelerate's state, so that every test can run an evaluation in this process."""


@pytest.fixture(scope="session")
def colors(tmp_path_factory):
    """Images of three colors: 8 each for training, 5 each for testing; one red test image is broken."""
    root = write_colors(tmp_path_factory.mktemp("colors"), train=8, test=5)
    (root / "test" / "red" / "3.png").write_bytes(b"this is no picture")
    return root
