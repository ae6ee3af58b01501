"""Runs that are killed, stopped, prolonged or moved to other processes end as one that nothing disturbed."""

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
from accelerate.state import AcceleratorState, GradientState, PartialState

from hf_vit.settings.recipes import read_recipe
from hf_vit.training.preemption import PREEMPTED

from ..commands import pretrain
from ..processes import DIGITS, LIMIT, arguments, code_of, command, environment, finish, launch, start, weights

# Dropout, averaging and accumulation: all that has state or chance in it. 150 images are 6.25 steps an epoch.
EVERYTHING = {**DIGITS, "dropout": 0.1, "drop_path": 0.1, "ema_decay": 0.9, "momentum_dtype": "bfloat16"}
EVERYTHING |= {"patch_sizes": "2,4,8", "train_split": "train[:150]", "steps": 12, "save_every": 2, "eval_every": 5}


def wait_for_checkpoint(output: Path, step: int, is_running: Callable[[], bool]):
    deadline = time.monotonic() + 120
    while not (output / "checkpoints" / f"step_{step:08d}").exists() and is_running():
        assert time.monotonic() < deadline, "the run saves nothing"
        time.sleep(0.001)


def assert_same(left: Path, right: Path, tolerance: float = 0):
    torch.testing.assert_close(weights(left), weights(right), rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Output folders of a run on one process and on two."""
    folders = {processes: tmp_path_factory.mktemp("whole") / "out" for processes in (1, 2)}
    for processes, output in folders.items():
        launch("pretrain", processes, output_dir=output, **EVERYTHING)
    return folders


@pytest.mark.parametrize(("processes", "saved", "delay"), [(1, 2, 0.0), (1, 8, 0.11), (2, 4, 0.05)])
def test_killed_and_resumed_is_bit_identical(uninterrupted, tmp_path, processes, saved, delay):
    """Kill -9 during a step, a save or an evaluation, in the first and the second epoch."""
    output = tmp_path / "out"
    running = start(code_of("pretrain", processes, output_dir=output, **EVERYTHING), processes)
    wait_for_checkpoint(output, saved, running[0].is_running)
    time.sleep(delay)
    for process in running:
        process.kill()
    done = launch("pretrain", processes, output_dir=output, resume="true", **EVERYTHING)
    assert f"{output}/checkpoints/step_" in done.stdout
    for folder in ("", "best"):
        assert_same(output / folder, uninterrupted[processes] / folder)


@pytest.mark.slow
def test_torchrun_restarts_after_one_process_is_killed(uninterrupted, tmp_path):
    """One command line, into a folder that is not there yet: torchrun ends the other process and starts both again.

    Without the variable, processes that start again find the addresses of the dead ones (pytorch issue 135712).
    """
    output = tmp_path / "out"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    line += ["--max_restarts", "1"]
    line += command("pretrain", output_dir=output, resume="true", **EVERYTHING | {"num_workers": 0})[1:]
    variables = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    launcher = subprocess.Popen(line, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_checkpoint(output, 4, lambda: launcher.poll() is None)
    workers = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    printed, _ = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 0, printed[-3000:]
    assert f"{output}/checkpoints/step_" in printed
    assert_same(output, uninterrupted[2])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"resume": "true", "learning_rate": 0.1, "per_device_batch_size": 12},
            ["learning_rate", "0.05", "0.1", "per_device_batch_size", "12"],
        ),
        ({}, ["/out", "--resume", "--overwrite"]),
    ],
)
def test_other_settings_and_a_second_run_are_refused(uninterrupted, changes, named):
    done = launch("pretrain", check=False, output_dir=uninterrupted[1], **EVERYTHING | changes)
    assert done.returncode == 2
    assert [text for text in named if text not in done.stderr] == []


def test_output_folder_of_a_run(uninterrupted):
    left = {file.name for file in uninterrupted[1].iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "metrics.json", "card_data.json"} <= left
    assert {"recipe.yaml", "learning_curve.png", "best", "checkpoints"} <= left
    kept = sorted(path.name for path in (uninterrupted[1] / "checkpoints").iterdir())
    assert kept == ["step_00000010", "step_00000012"]
    assert json.loads((uninterrupted[1] / "metrics.json").read_text())["samples"] == 103


# 24 images are 6, 3 or 2 forwards of 4
ELASTIC = {**DIGITS, "per_device_batch_size": 4, "dropout": 0.1, "drop_path": 0.1, "mixup_alpha": 0.3}
ELASTIC |= {"cutmix_alpha": 0.5, "ema_decay": 0.9, "schedule": "constant", "steps": 12, "save_every": 3}
ELASTIC |= {"eval_every": 50, "eval_split": "test[:20]", "resume": "true"}

DIE_WHILE_SAVING = """
import os
import signal
from hf_vit.training import checkpoint

sha256_of = checkpoint.sha256_of

def deadly(path):
    if "00000012.incomplete" in str(path) and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return sha256_of(path)

checkpoint.sha256_of = deadly
"""


def test_changing_numbers_of_processes_equal_one(tmp_path):
    """2 processes until SIGTERM, 1 until SIGUSR1, 2 until one is killed while saving, 3 to the end."""

    def begin(output, processes, code=""):
        return start(code + code_of("pretrain", processes, output_dir=output, **ELASTIC), processes)

    def newest():
        return max(int(path.name[5:]) for path in (output / "checkpoints").glob("step_*"))

    for processes in (1, 3):
        finish(begin(tmp_path / str(processes), processes))
    output = tmp_path / "disturbed"
    running = begin(output, 2)  # into a folder that is not there
    wait_for_checkpoint(output, 3, running[0].is_running)
    os.kill(running[1].pid, signal.SIGTERM)  # one of them: both save
    assert "SIGTERM: " in finish(running, check=False).stderr
    assert [process.status for process in running] == [PREEMPTED] * 2
    first = newest()
    [alone] = begin(output, 1)
    wait_for_checkpoint(output, 3 * (first // 3 + 1), alone.is_running)
    os.killpg(alone.pid, signal.SIGUSR1)  # its data worker too, as schedulers do
    assert finish([alone], check=False).returncode == PREEMPTED
    second = newest()
    for process in begin(output, 2, DIE_WHILE_SAVING):  # the survivor does not wait for its threads either
        with pytest.raises(AssertionError, match="killed"):
            process.wait()
    assert first < second <= newest() < 12
    finish(begin(output, 3))
    assert newest() == 12
    assert not list((output / "checkpoints").glob(".*"))
    for folder in ("3", "disturbed"):
        assert_same(tmp_path / folder, tmp_path / "1", 1e-6)


SHORT = {**DIGITS, "num_workers": 0, "warmup_steps": 1, "save_every": 2, "eval_every": 100, "log_every": 2}
SHORT |= {"eval_split": "test[:20]", "resume": "true"}
WSD = {"schedule": "wsd", "cooldown_steps": 1, "optimizer": "muon", "class_sampling": "balanced"}


def train(output, **changes):
    pretrain(arguments(**{**SHORT, "output_dir": output, **changes}))
    return weights(output)


@pytest.mark.parametrize("schedule", [{"schedule": "constant"}, {"schedule": "cosine", "decay_steps": 5}, WSD])
def test_extended_run_equals_a_run_of_the_new_length(tmp_path, schedule):
    """The same command line serves every start: the first finds neither folder nor checkpoint."""
    train(tmp_path / "out", steps=2, **schedule)
    prolonged = train(tmp_path / "out", steps=4, **schedule)
    assert read_recipe(tmp_path / "out" / "recipe.yaml")["steps"] == 4
    straight = train(tmp_path / "straight", steps=4, **schedule)
    torch.testing.assert_close(prolonged, straight, rtol=0, atol=0)


def test_damaged_checkpoints_are_moved_and_never_trained_over(tmp_path):
    """The run continues from the one before them; without an intact one it is refused."""
    checkpoints = tmp_path / "out" / "checkpoints"
    straight = train(tmp_path / "out", steps=4)
    (checkpoints / "step_00000004" / "checksums.json").write_text("{}")
    torch.testing.assert_close(train(tmp_path / "out", steps=4), straight, rtol=0, atol=0)
    kept = {"step_00000002", "step_00000004", "damaged"}
    assert {path.name for path in checkpoints.iterdir()} == kept
    for path in checkpoints.glob("step_*"):
        (path / "state.json").unlink()
    with pytest.raises(ValueError, match="damaged"):
        train(tmp_path / "out", steps=4)
    assert {path.name for path in checkpoints.iterdir()} == kept
    assert (checkpoints / "damaged" / "step_00000004" / "state.json").is_file()


def test_a_number_of_steps_that_earlier_rates_depend_on_is_refused(tmp_path, monkeypatch):
    """And a precision of the launch that is not in the settings."""
    train(tmp_path / "out", steps=4)
    for steps in (6, 3):
        with pytest.raises(ValueError, match=f"4 .* {steps}"):
            train(tmp_path / "out", steps=steps)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match="bf16"):
        train(tmp_path / "out", steps=4)


def test_images_per_forward_may_change_without_random_numbers_per_forward(tmp_path):
    """Without dropout or mixing only rounding differs; without a setting, the saved number is kept."""
    settings = {"schedule": "constant", "per_device_batch_size": 6}
    train(tmp_path / "out", steps=2, **settings)
    ours = train(tmp_path / "out", **{**settings, "steps": 4, "per_device_batch_size": 12})
    straight = train(tmp_path / "straight", steps=4, **settings)
    torch.testing.assert_close(ours, straight, rtol=0, atol=1e-6)
    settings["mixup_alpha"] = 0.2
    train(tmp_path / "mixed", steps=2, **settings)
    with pytest.raises(ValueError, match="per_device_batch_size"):
        train(tmp_path / "mixed", **{**settings, "steps": 4, "per_device_batch_size": 12})
