"""Accelerate starts afresh in each test, so that a run in this process does not depend on earlier ones."""

import pytest


@pytest.fixture(autouse=True)
def _fresh_accelerator(fresh_accelerator):
    """Reset Accelerate's state."""
