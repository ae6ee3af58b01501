"""A run that is killed and resumed ends with the weights of one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ..launching import DIGITS, LIMIT, command, environment, launch, weights

pytestmark = pytest.mark.slow

# dropout, averaging and accumulation: all that has state or chance in it
EVERYTHING = {**DIGITS, "dropout": 0.1, "drop_path": 0.1, "ema_decay": 0.9, "momentum_dtype": "bfloat16"}
EVERYTHING |= {"patch_sizes": "2,4,8"}


def start_and_kill(output: Path, saved: int, delay: float, processes: int, **settings):
    """Start a run, wait until it has saved `saved` steps and then `delay` seconds, and kill -9 all of it."""
    line = command("pretrain", processes, output_dir=output, **settings)
    process = subprocess.Popen(
        line, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_for_checkpoint(output, saved, process)
    time.sleep(delay)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for_checkpoint(output: Path, step: int, process: subprocess.Popen):
    deadline = time.monotonic() + 120
    while not (output / "checkpoints" / f"step_{step:08d}").exists() and process.poll() is None:
        assert time.monotonic() < deadline, "the run saves nothing"
        time.sleep(0.01)


def assert_same(left: Path, right: Path):
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "out"
    launch("pretrain", output_dir=output, **EVERYTHING)
    return output


@pytest.mark.parametrize(("steps", "delay"), [(9, 0.0), (45, 0.11)])
def test_killed_and_resumed_is_bit_identical(uninterrupted, tmp_path, steps, delay):
    """Kill the run during a step, a save or an evaluation, in the first and the second epoch."""
    output = tmp_path / "out"
    start_and_kill(output, steps, delay, 1, **EVERYTHING)
    done = launch("pretrain", output_dir=output, resume="true", **EVERYTHING)
    assert f"Resuming from {output}/checkpoints/step_" in done.stdout
    assert_same(output, uninterrupted)
    assert_same(output / "best", uninterrupted / "best")


PAIR = {**EVERYTHING, "steps": 30, "num_processes": 2}


@pytest.fixture(scope="module")
def uninterrupted_pair(tmp_path_factory):
    output = tmp_path_factory.mktemp("pair") / "out"
    launch("pretrain", 2, output_dir=output, **PAIR)
    return output


def test_two_processes_killed_and_resumed_are_bit_identical(uninterrupted_pair, tmp_path):
    start_and_kill(tmp_path / "out", 18, 0.05, 2, **PAIR)
    launch("pretrain", 2, output_dir=tmp_path / "out", resume="true", **PAIR)
    assert_same(tmp_path / "out", uninterrupted_pair)


def test_torchrun_restarts_after_one_process_is_killed(uninterrupted_pair, tmp_path):
    """One command line, into a folder that is not there yet: torchrun ends the other process and starts both again.

    Without the variable, processes that start again find the addresses of the dead ones (pytorch issue 135712).
    """
    output = tmp_path / "out"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    line += ["--max_restarts", "1", *command("pretrain", output_dir=output, resume="true", **PAIR)[1:]]
    variables = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launcher = subprocess.Popen(line, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_checkpoint(output, 18, launcher)
    workers = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    said, _ = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 0, said[-3000:]
    assert f"Resuming from {output}/checkpoints/step_" in said
    assert_same(output, uninterrupted_pair)


def test_damaged_checkpoint_is_detected_and_the_one_before_is_used(uninterrupted, tmp_path):
    import shutil

    output = tmp_path / "out"
    shutil.copytree(uninterrupted, output)
    newest = sorted((output / "checkpoints").glob("step_*"))[-1]
    damaged = next(newest.glob("*.safetensors"))
    with damaged.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\0\1\2")
    done = launch("pretrain", output_dir=output, resume="true", **EVERYTHING)
    assert f"{newest} is damaged (the SHA-256 of {damaged.name} is not the one it was saved with)" in done.stdout
    assert "step_00000063" in done.stdout
    assert_same(output, uninterrupted)


def test_other_settings_are_refused_on_resume(uninterrupted):
    changed = {**EVERYTHING, "per_device_batch_size": 12, "learning_rate": 0.1}
    done = launch("pretrain", check=False, output_dir=uninterrupted, resume="true", **changed)
    assert done.returncode == 2
    assert "learning_rate was 0.05 and is 0.1; per_device_batch_size was 6 and is 12" in done.stderr


def test_a_second_run_into_the_same_folder_is_refused(uninterrupted):
    done = launch("pretrain", check=False, output_dir=uninterrupted, **EVERYTHING)
    assert done.returncode == 2
    assert "is not empty: continue it with --resume, or delete it with --overwrite" in done.stderr


def test_output_folder_of_a_run(uninterrupted):
    left = {file.name for file in uninterrupted.iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "metrics.json", "card_data.json"} <= left
    assert {"recipe.yaml", "learning_curve.png", "best", "checkpoints"} <= left
    kept = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    assert kept == ["step_00000063", "step_00000070"]
    metrics = json.loads((uninterrupted / "metrics.json").read_text())
    assert metrics["samples"] == 103
    assert metrics["loss"] < 2.3  # nats; a guess has 2.3026
