"""A run that is killed and resumed ends with the weights of one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ..processes import DIGITS, LIMIT, code_of, command, environment, launch, start, weights

# Dropout, averaging and accumulation: all that has state or chance in it. 300 images are 12.5 steps an epoch.
EVERYTHING = {**DIGITS, "dropout": 0.1, "drop_path": 0.1, "ema_decay": 0.9, "momentum_dtype": "bfloat16"}
EVERYTHING |= {"patch_sizes": "2,4,8", "train_split": "train[:300]", "steps": 20, "save_every": 3, "eval_every": 8}


def start_and_kill(output: Path, saved: int, delay: float, processes: int, **settings):
    """Start a run, wait until it has saved `saved` steps and then `delay` seconds, and kill -9 all of it."""
    running = start(code_of("pretrain", processes, output_dir=output, **settings), processes)
    wait_for_checkpoint(output, saved, running[0].is_running)
    time.sleep(delay)
    for process in running:
        process.kill()


def wait_for_checkpoint(output: Path, step: int, is_running: Callable[[], bool]):
    deadline = time.monotonic() + 120
    while not (output / "checkpoints" / f"step_{step:08d}").exists() and is_running():
        assert time.monotonic() < deadline, "the run saves nothing"
        time.sleep(0.01)


def assert_same(left: Path, right: Path):
    torch.testing.assert_close(weights(left), weights(right), rtol=0, atol=0)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "out"
    launch("pretrain", output_dir=output, **EVERYTHING)
    return output


@pytest.mark.parametrize(("steps", "delay"), [(3, 0.0), (15, 0.11)])
def test_killed_and_resumed_is_bit_identical(uninterrupted, tmp_path, steps, delay):
    """Kill the run during a step, a save or an evaluation, in the first and the second epoch."""
    output = tmp_path / "out"
    start_and_kill(output, steps, delay, 1, **EVERYTHING)
    done = launch("pretrain", output_dir=output, resume="true", **EVERYTHING)
    assert f"{output}/checkpoints/step_" in done.stdout
    assert_same(output, uninterrupted)
    assert_same(output / "best", uninterrupted / "best")


PAIR = {**EVERYTHING, "num_processes": 2}


@pytest.fixture(scope="module")
def uninterrupted_pair(tmp_path_factory):
    output = tmp_path_factory.mktemp("pair") / "out"
    launch("pretrain", 2, output_dir=output, **PAIR)
    return output


def test_two_processes_killed_and_resumed_are_bit_identical(uninterrupted_pair, tmp_path):
    start_and_kill(tmp_path / "out", 9, 0.05, 2, **PAIR)
    launch("pretrain", 2, output_dir=tmp_path / "out", resume="true", **PAIR)
    assert_same(tmp_path / "out", uninterrupted_pair)


@pytest.mark.slow
def test_torchrun_restarts_after_one_process_is_killed(uninterrupted_pair, tmp_path):
    """One command line, into a folder that is not there yet: torchrun ends the other process and starts both again.

    Without the variable, processes that start again find the addresses of the dead ones (pytorch issue 135712).
    """
    output = tmp_path / "out"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    line += ["--max_restarts", "1"]
    line += command("pretrain", output_dir=output, resume="true", **PAIR | {"num_workers": 0})[1:]
    variables = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launcher = subprocess.Popen(line, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_checkpoint(output, 9, lambda: launcher.poll() is None)
    workers = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    printed, _ = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 0, printed[-3000:]
    assert f"{output}/checkpoints/step_" in printed
    assert_same(output, uninterrupted_pair)


def test_other_settings_are_refused_on_resume(uninterrupted):
    changed = {**EVERYTHING, "per_device_batch_size": 12, "learning_rate": 0.1}
    done = launch("pretrain", check=False, output_dir=uninterrupted, resume="true", **changed)
    assert done.returncode == 2
    assert all(text in done.stderr for text in ("learning_rate", "0.05", "0.1", "per_device_batch_size", "12"))


def test_a_second_run_into_the_same_folder_is_refused(uninterrupted):
    done = launch("pretrain", check=False, output_dir=uninterrupted, **EVERYTHING)
    assert done.returncode == 2
    assert all(text in done.stderr for text in (str(uninterrupted), "--resume", "--overwrite"))


def test_output_folder_of_a_run(uninterrupted):
    left = {file.name for file in uninterrupted.iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "metrics.json", "card_data.json"} <= left
    assert {"recipe.yaml", "learning_curve.png", "best", "checkpoints"} <= left
    kept = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert kept == ["step_00000018", "step_00000020"]
    metrics = json.loads((uninterrupted / "metrics.json").read_text())
    assert metrics["samples"] == 103
