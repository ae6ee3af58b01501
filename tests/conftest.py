import json
import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the tests run in two processes; threads that wait for each other cost more than they give

GOLDENS = Path(__file__).parent / "goldens"
SHARED = Path(os.environ.get("HF_VIT_SHARED", Path(__file__).parents[2] / "shared"))


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Small checkpoints and what the original JAX code computes from them; see the README in the folder."""
    return GOLDENS


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real images and weights, which are not part of the project."""
    if not (SHARED / "weights").is_dir():
        pytest.skip("the folder of real images and weights is not beside the checkout")
    return SHARED


def golden_runs(*families: str) -> list[dict]:
    """The runs of goldens/index.json that belong to a model family."""
    runs = json.loads((GOLDENS / "index.json").read_text())
    return [run for run in runs if run["family"] in families]
