import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from .hub_client import Clients
from .local_hub import LocalHub

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


HUB_TOKENS = {
    "hf_alice": {"name": "alice", "orgs": ["acme"]},
    "hf_bob": {"name": "bob"},
    "hf_me": {"name": "me", "orgs": ["google", "ILSVRC"]},
    "hf_reader": {"name": "alice", "role": "read"},
}


@pytest.fixture(scope="session")
def _hub_and_clients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with LocalHub(folder / "hub", HUB_TOKENS) as hub:
        clients = Clients(hub, folder / "clients")
        yield hub, clients
        clients.stop()


@pytest.fixture
def hub(_hub_and_clients):
    """A Hub on this machine, with nothing in it; see local_hub.py."""
    hub, _ = _hub_and_clients
    for part in ("repos", "objects"):
        shutil.rmtree(hub.root / part)
        (hub.root / part).mkdir()
    hub.requests.clear()
    hub.faults.clear()
    return hub


@pytest.fixture
def client(hub, _hub_and_clients):
    """Runs Python code, or `hf-vit` with a list of arguments, as a user of the Hub, with a fresh cache."""
    return _hub_and_clients[1]
