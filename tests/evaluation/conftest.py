"""Each test starts Accelerate afresh."""

import pytest


@pytest.fixture(autouse=True)
def _fresh_accelerator(fresh_accelerator):
    """Reset Accelerate's state, so that every test can run an evaluation in this process."""
