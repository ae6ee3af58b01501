"""The benchmark for a GPU, which no test has: all of it at toy size, and what must hold when a lease ends early."""

import json
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from ..paths import ROOT
from ..tiny_models import images, tiny
from .test_programs import load_benchmark

PROGRAM = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--device", "cpu", "--toy"]


def start(output, *arguments):
    command = [*PROGRAM, "--output", output, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def read(output):
    """Rows by name; every line is whole."""
    lines = (output / "results.jsonl").read_text().splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


@pytest.mark.slow
def test_every_row_runs_at_toy_size(tmp_path):
    gpu = load_benchmark("gpu")
    program = start(tmp_path / "out")
    printed, progress = program.communicate(timeout=900)
    assert program.returncode == 0, progress
    found = read(tmp_path / "out")
    assert list(found) == ["setup", *(row.name for row in gpu.ladder(toy=True))]
    assert {row["status"] for row in found.values()} <= {"done", "omitted"}, progress
    omitted = {row["setting"]["attention"] for row in found.values() if row["status"] == "omitted" and "train" in row}
    assert omitted <= {"cudnn", "kernels-community/flash-attn3"}
    counts = {(row["kind"], row["result"].get("flops_per_image")) for row in found.values()}
    [forward], [step] = ([count for kind, count in counts if kind == which and count] for which in ("infer", "train"))
    assert step == 3 * forward
    reference = found["train toy float32"]["result"]["losses"]
    spread = max(reference) - min(reference)
    for name in ("bf16 autocast", "compile, tokens padded to x8"):
        assert abs(found[f"train toy {name}"]["result"]["loss"] - reference[0]) < spread
    assert found["run toy resume"]["result"] == {"equal_bits": True}
    assert found["run toy CPU and device"]["result"] == {"largest_difference": 0}
    assert found["run toy loop"]["result"]["images_per_second"] > 0
    assert found["paper"]["result"]["samples"] == 64
    table = gpu.as_markdown(gpu.Results(tmp_path / "out" / "results.jsonl"))
    assert table in printed
    assert (tmp_path / "out" / "tables.md").read_text().strip() == table


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path):
    """With a CPU build of torch, and with a CUDA build, whose imports must not need a device."""
    command = [*PROGRAM[:2], "--output", tmp_path / "out"]
    program = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert program.returncode == 2, program.stderr
    assert "CUDA" in program.stderr
    assert read(tmp_path / "out") == {}


@pytest.mark.slow
def test_measured_rows_are_kept_after_a_kill(tmp_path):
    """After a kill too; a resumed run measures the rest alone, and SIGTERM has it print what there is."""
    path = tmp_path / "results.jsonl"
    program = start(tmp_path, "--only", "train toy TF32", "images")
    wait_for(program, path, '"train toy TF32"')
    program.kill()
    program.communicate(timeout=60)
    before = path.read_text()
    read(tmp_path)
    path.write_text(before + '{"name": "images')  # as a kill within a write would leave it
    program = start(tmp_path, "--resume", "--only", "TF32", "padded", "images")
    wait_for(program, path, "train toy compile, tokens padded")
    program.terminate()
    printed, progress = program.communicate(timeout=60)
    assert program.returncode == 128 + signal.SIGTERM
    assert "toy TF32" in printed
    assert "toy compile, tokens padded" in printed
    assert "train toy TF32:" not in progress
    assert path.read_text().startswith(before)
    assert len(read(tmp_path)) < 6  # of six; it did not go on to the end


def wait_for(program, path, text):
    while not (path.exists() and text in path.read_text()):
        assert program.poll() is None
        time.sleep(0.02)


def test_padded_tokens_do_not_change_the_logits():
    model: Any = tiny().eval()
    expected = model(images(model)).logits
    seen = []
    model.vit.layers[0].mlp.register_forward_hook(lambda *call: seen.append(call[2].shape[1]))
    load_benchmark("gpu_models").pad_tokens(model, 8)
    torch.testing.assert_close(model(images(model)).logits, expected, rtol=1e-5, atol=1e-5)
    assert seen[0] % 8 == 0
