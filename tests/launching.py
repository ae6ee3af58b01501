"""Runs of the training scripts in processes of their own, as users start them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from .paths import ROOT
from .tiny_models import SIZES

LIMIT = 300  # seconds: a run that hangs is a failure, not an endless test
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


def command(script: str, processes: int = 1, **settings) -> list[str]:
    """The command line of a script; two processes talk over gloo, without data workers, which start slowly."""
    python = [sys.executable]
    if processes > 1:
        settings["num_workers"] = 0
        python += ["-m", "accelerate.commands.launch", "--num_processes", str(processes)]
        python += ["--config_file", str(ROOT / "training" / "accelerate" / "multi_cpu.yaml")]
    return [*python, str(ROOT / "training" / f"{script}.py"), *arguments(**settings)]


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


def launch(
    script: str, processes: int = 1, check: bool = True, variables: dict[str, str | None] | None = None, **settings
) -> subprocess.CompletedProcess:
    """Run a script to its end; `variables` change its environment, where None takes one out."""
    changed = {name: value for name, value in {**environment(), **(variables or {})}.items() if value is not None}
    line = command(script, processes, **settings)
    done = subprocess.run(line, env=changed, capture_output=True, text=True, timeout=LIMIT)
    if check and done.returncode:
        raise AssertionError(f"exit status {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done


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
