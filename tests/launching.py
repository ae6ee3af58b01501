"""Runs of the training scripts in processes of their own."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file

from .forked import Forked, ForkServer
from .paths import ROOT
from .tiny_models import SIZES

MODEL = {**SIZES, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
# 1,437 digits are 60 steps of 24 an epoch; 70 steps end in the second one
DIGITS = {
    "dataset": "digits",
    "eval_split": "test[:103]",
    "config": json.dumps(MODEL),
    "batch_size": 24,
    "per_device_batch_size": 6,
    "crop_area": "0.6,1",
    "flip": "false",
    "learning_rate": 0.05,
    "warmup_steps": 5,
    "steps": 70,
    "log_every": 1,
    "eval_every": 25,
    "save_every": 9,
    "eval_batch_size": 32,
    "num_workers": 1,
    "report_to": "none",
}


def arguments(**settings) -> list[str]:
    """Of a command line: names and values."""
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def command(script: str, **settings) -> list[str]:
    """The command line of a script, in one process."""
    return [sys.executable, str(ROOT / "training" / f"{script}.py"), *arguments(**settings)]


def through(template: str, processes: int, runs: Path, *options: str) -> list[str]:
    """The command line of the runs in a file (see launched.py) through a launch template, on CPUs and in float32."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    launcher += ["--config_file", str(ROOT / "training" / "accelerate" / f"{template}.yaml"), "--mixed_precision", "no"]
    return [*launcher, *options, str(ROOT / "tests" / "launched.py"), str(runs)]


def environment() -> dict[str, str]:
    offline = {
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "0",
    }
    return {**os.environ, **offline, "PYTHONPATH": str(ROOT)}


@cache
def server() -> ForkServer:
    """Return the process that training runs are forked from."""
    return ForkServer(Path(tempfile.mkdtemp(prefix="hf_vit_runs_")), environment())


def stop_server() -> None:
    """End the process that `server` started, if it did."""
    if server.cache_info().currsize:
        server().stop()
        shutil.rmtree(server().folder)


def start(code: str, processes: int = 1, variables: dict[str, str | None] | None = None) -> list[Forked]:
    """Run Python code in processes that talk over gloo, as launchers start them.

    Args:
        variables: changes of their environment, where None takes one out.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running = []
    for rank in range(processes):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), **world} if processes > 1 else {}
        changed = {**environment(), **place, **(variables or {})}
        running.append(server().start(code, {name: value for name, value in changed.items() if value is not None}))
    return running


def finish(running: list[Forked], check: bool = True) -> subprocess.CompletedProcess:
    """Wait for processes; return what they print, that of the main process first, and the largest exit status."""
    printed = [process.wait() for process in running]
    output, errors = ("".join(texts) for texts in zip(*printed, strict=True))
    status = max(process.status for process in running)
    assert not (check and status), f"exit status {status}:\n{output[-2000:]}\n{errors[-4000:]}"
    return subprocess.CompletedProcess([], status, output, errors)


def code_of(script: str, processes: int = 1, **settings) -> str:
    """Python code that runs a training script; several processes have no data workers, which start slowly."""
    settings |= {"num_workers": 0} if processes > 1 else {}
    return f"from hf_vit.scripts.{script} import main\nmain({arguments(**settings)!r})"


def launch(
    script: str, processes: int = 1, check: bool = True, variables: dict[str, str | None] | None = None, **settings
) -> subprocess.CompletedProcess:
    """Run a script to its end."""
    return finish(start(code_of(script, processes, **settings), processes, variables), check)


def weights(folder: Path) -> dict:
    return load_file(folder / "model.safetensors")


def history(folder: Path) -> list[dict]:
    """What the newest checkpoint says of the steps so far."""
    newest = max((folder / "checkpoints").glob("step_*"))
    return json.loads((newest / "state.json").read_text())["history"]


def locale_environment(locale: str, folder: Path) -> dict[str, str]:
    """The environment of a process in a locale that is not UTF-8; skips the test where it cannot be made."""
    if locale != "C":
        language, _, charset = locale.partition(".")
        line = ["localedef", "-i", language, "-f", charset, str(folder / "locales" / locale)]
        (folder / "locales").mkdir()
        if shutil.which("localedef") is None or subprocess.run(line, capture_output=True).returncode:
            pytest.skip(f"the locale {locale} cannot be made")
    changes = {"LC_ALL": locale, "LOCPATH": str(folder / "locales"), "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    return {**environment(), **changes}
