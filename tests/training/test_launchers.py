"""Every launch template trains for five steps, on CPU processes over gloo, as one process does.

Judged by the weights of the run in one process, whose steps other tests hold to the originals. test_matrix.py has more
kinds of runs, and HSDP; multi_cpu.yaml starts the processes of test_distributed.py.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

from ..commands import pretrain
from ..processes import DIGITS, LIMIT, MODEL, arguments, environment, through, weights

pytestmark = pytest.mark.slow

TIMEOUT = 8  # seconds: more than data workers take to start
SHORT = {**DIGITS, "steps": 5, "warmup_steps": 1, "eval_every": 5, "save_every": 3, "num_workers": 0}
HYBRID = {**MODEL, "patch_size": 1, "image_size": 16, "stem_depths": [1], "stem_width": 32}
BIT = {"embedding_size": 32, "depths": [1, 2], "image_size": 16}
ADAMW = {"optimizer": "adamw", "adam_epsilon": 1e-3, "weight_decay": 0.1, "learning_rate": 0.01}  # 0 / 0 at 1e-8
RUNS = {
    "sgd": SHORT | {"ema_decay": 0.9, "dropout": 0.1},
    "compact": SHORT | ADAMW | {"momentum_dtype": "bfloat16", "layer_decay": 0.8, "freeze": "patch_embeddings"},
    "hybrid": SHORT | ADAMW | {"config": json.dumps(HYBRID), "gradient_checkpointing": "true"},
    "bit": SHORT | {"config": json.dumps(BIT)},
}


def write_runs(folder: Path, names: list[str]) -> Path:
    """Write the command line of each run for launched_runs.py; runs with a folder are resumed."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {name: {"output_dir": folder / name, "resume": (folder / name).exists()} for name in names}
    lines = [["pretrain", *arguments(**RUNS[name], **output)] for name, output in outputs.items()]
    (folder / "runs.json").write_text(json.dumps(lines))
    return folder / "runs.json"


def finish(*lines: list[str]) -> list[str]:
    """Start command lines side by side; return what they print when they have ended well."""
    starts = [
        subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in lines
    ]
    ends = [process.communicate(timeout=LIMIT) for process in starts]
    for process, (_, errors) in zip(starts, ends, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [printed for printed, _ in ends]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Through both templates of one process, a part of the runs each."""
    folder = tmp_path_factory.mktemp("launchers")
    for template, names in {"cpu": ["sgd", "compact"], "single_gpu": ["hybrid", "bit"]}.items():
        [printed] = finish(through(template, 1, write_runs(folder, names)))
        assert "NO of 1" in printed
    assert weights(folder / "sgd")["classifier.weight"].any()
    return folder


def assert_same(folder: Path, one_process: Path, names: list[str]):
    for name in names:
        torch.testing.assert_close(weights(folder / name), weights(one_process / name), rtol=0, atol=1e-5)
        left, right = (json.loads((run / name / "metrics.json").read_text()) for run in (folder, one_process))
        assert left["samples"] == right["samples"] == 103
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
        _, info = AutoModelForImageClassification.from_pretrained(folder / name, output_loading_info=True)
        assert not any(info.values()), info
        AutoImageProcessor.from_pretrained(folder / name)


def test_fsdp(one_process, tmp_path):
    """From the first step, from a checkpoint of one process, and on to one process."""
    without_last_step = shutil.ignore_patterns("step_00000005")
    shutil.copytree(one_process / "compact", tmp_path / "out" / "compact", ignore=without_last_step)
    runs = write_runs(tmp_path / "out", list(RUNS))
    printed = finish(through("fsdp", 2, runs, "--main_process_port", "0"))
    assert "FSDP of 2" in printed[0]
    assert f"{tmp_path / 'out' / 'compact'}/checkpoints/step_00000003" in printed[0]
    assert_same(tmp_path / "out", one_process, list(RUNS))
    for name in ("sgd", "hybrid"):
        shutil.copytree(tmp_path / "out" / name, tmp_path / "alone" / name, ignore=without_last_step)
        pretrain(arguments(**RUNS[name], output_dir=tmp_path / "alone" / name, resume="true"))
    assert_same(tmp_path / "alone", one_process, ["sgd", "hybrid"])


def test_two_machines(one_process, tmp_path):
    """Two launchers, each with one process."""
    runs = write_runs(tmp_path / "out", ["compact"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free.getsockname()[1])]
    printed = finish(*(through("multi_node", 2, runs, *address, "--machine_rank", str(rank)) for rank in (0, 1)))
    assert "MULTI_CPU of 2" in printed[0]
    assert_same(tmp_path / "out", one_process, ["compact"])


def wait_for(what: Callable[[], object], launcher: subprocess.Popen, log: Path):
    deadline = time.monotonic() + LIMIT / 2
    while not what():
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        assert launcher.poll() is None, log.read_text()[-4000:]
        time.sleep(0.1)


def test_multi_gpu_and_a_stopped_process(one_process, tmp_path, monkeypatch):
    """One run ends; in an endless run with a data worker, one of two processes gets SIGSTOP and the other one ends."""
    endless = DIGITS | {"steps": 100_000, "save_every": 20, "eval_every": 100_000, "stall_timeout": TIMEOUT}
    monkeypatch.setitem(RUNS, "endless", endless)
    log = tmp_path / "log"
    line = through("multi_gpu", 2, write_runs(tmp_path / "out", ["compact", "endless"]), "--main_process_port", "0")
    with log.open("w") as file:
        launcher = subprocess.Popen(line, env=environment(), stdout=file, stderr=file, start_new_session=True)
    try:
        wait_for(lambda: list((tmp_path / "out" / "endless" / "checkpoints").glob("step_*")), launcher, log)
        children = psutil.Process(launcher.pid).children()
        stopped = next(child for child in children if child.environ().get("RANK") == "1")
        [server] = [child for child in stopped.children() if "forkserver" in " ".join(child.cmdline())]
        assert server.children()  # the data worker, forked where no thread of gloo's is
        stopped.suspend()
        wait_for(lambda: f"--stall-timeout {TIMEOUT}" in log.read_text(), launcher, log)
    finally:
        for process in psutil.Process(launcher.pid).children():  # each in a session of its own
            process.kill()
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    assert_same(tmp_path / "out", one_process, ["compact"])
    message = next(text for text in log.read_text().splitlines() if "--stall-timeout" in text)
    assert "Rank 1" in message
