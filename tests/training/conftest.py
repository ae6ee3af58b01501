"""Each test starts Accelerate afresh, so that a run in this process does not depend on earlier ones."""

import pytest


@pytest.fixture(autouse=True)
def _fresh_accelerator(fresh_accelerator):
    """Reset Accelerate's state."""


@pytest.fixture(autouse=True)
def _blank_figures(request):
    """Draw figures only in tests that are marked with `figures`."""
    if request.node.get_closest_marker("figures") is None:
        request.getfixturevalue("blank_figures")
