"""Each test starts Accelerate afresh, so that a run in this process does not depend on earlier ones."""

import pytest
from matplotlib.backend_bases import FigureCanvasBase

from ..blank_figures import print_blank_figure


@pytest.fixture(autouse=True)
def _fresh_accelerator(fresh_accelerator):
    """Reset Accelerate's state."""


@pytest.fixture(autouse=True)
def _blank_figures(request, monkeypatch):
    """Draw figures only in tests that are marked with `figures`."""
    if request.node.get_closest_marker("figures") is None:
        monkeypatch.setattr(FigureCanvasBase, "print_figure", print_blank_figure)
