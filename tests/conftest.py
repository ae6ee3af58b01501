import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

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
    "hf_reader": {"name": "alice", "role": "read"},
}


@pytest.fixture
def hub(tmp_path):
    """A Hub on this machine, see local_hub.py."""
    with LocalHub(tmp_path / "hub", HUB_TOKENS) as running:
        yield running


@pytest.fixture
def client(hub, tmp_path):
    """Runs a command as a user of the Hub, in a process of its own: huggingface_hub reads its address when imported.

    The command is either a list (`["-m", "hf_vit.cli", ...]`) or Python code; every run has a fresh cache.
    """
    homes = iter(range(100))

    def run(command, token: str | None = "hf_alice", status: int = 0, **changes: str) -> str:
        done = start_client(hub, command, token, tmp_path / f"home{next(homes)}", **changes)
        output, error = done.communicate()
        assert done.returncode == status, output + error
        return (error if status else output).strip()

    return run


def start_client(hub, command, token: str | None, home: Path, **changes: str) -> subprocess.Popen:
    arguments = ["-c", textwrap.dedent(command)] if isinstance(command, str) else [str(part) for part in command]
    environment = {
        **os.environ,
        **hub.env(token, home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "PYTHONWARNINGS": "error::UserWarning:hf_vit",
        **changes,
    }
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
