"""The benchmark for a GPU, which no test has: all of it at toy size, and what must hold when a lease ends early."""

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.data.augmentation import Box, crop_and_resize
from hf_vit.training.objectives import Normalizer

from .paths import ROOT
from .test_benchmarks import load_benchmark
from .tiny_models import images, tiny

PROGRAM = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--device", "cpu", "--toy"]


def start(output, *arguments):
    return subprocess.Popen(
        [*PROGRAM, "--output", output, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def read(output):
    """Rows by name; every line is whole."""
    lines = (output / "results.jsonl").read_text().splitlines()
    return {row["name"]: row for row in map(json.loads, lines)}


@pytest.mark.slow
def test_every_row_runs_at_toy_size(tmp_path):
    rows, results = load_benchmark("gpu_rows"), load_benchmark("gpu_results")
    program = start(tmp_path / "out")
    printed, progress = program.communicate(timeout=600)
    assert program.returncode == 0, progress
    found = read(tmp_path / "out")
    assert list(found) == ["setup", *(row.name for row in rows.ladder(toy=True))]
    reasons = {name: row["reason"] for name, row in found.items() if row["status"] != "done"}
    assert all(word in " ".join(reasons.values()) for word in ("cuDNN", "kernels"))
    assert {found[name]["status"] for name in reasons} == {"left out"}, reasons
    for row in found.values():
        if row["kind"] in ("train", "infer") and row["status"] == "done":
            assert row["result"]["images_per_second"] > 0 < row["result"]["flops_per_image"]
    flops = {(row["kind"], row["result"].get("flops_per_image")) for row in found.values() if row["status"] == "done"}
    [forward], [step] = ([count for kind, count in flops if kind == which] for which in ("infer", "train"))
    assert step == 3 * forward
    reference = found["train toy float32"]["result"]["losses"]
    spread = max(reference) - min(reference)
    for name in ("bf16 autocast", "compile, tokens padded to x8"):
        assert abs(found[f"train toy {name}"]["result"]["loss"] - reference[0]) < spread
    assert found["paper"]["result"]["samples"] == 64
    table = results.as_markdown(results.Results(tmp_path / "out" / "results.jsonl"))
    assert table in printed
    assert (tmp_path / "out" / "tables.md").read_text().strip() == table


@pytest.mark.slow
def test_measured_rows_are_kept_after_a_kill(tmp_path):
    """After a kill too; a resumed run measures the rest alone, and SIGTERM has it print what there is."""
    path = tmp_path / "results.jsonl"
    program = start(tmp_path, "--only", "peak", "images", "train toy TF32")
    wait_for(program, path, '"peak"')
    program.kill()
    program.communicate(timeout=60)
    before = path.read_text()
    read(tmp_path)
    path.write_text(before + '{"name": "train toy')  # as a kill within a write would leave it
    program = start(tmp_path, "--resume", "--only", "peak", "padded", "TF32")
    wait_for(program, path, "train toy TF32")
    program.terminate()
    printed, progress = program.communicate(timeout=60)
    assert program.returncode == 128 + signal.SIGTERM
    assert "TFLOP/s" in printed
    assert "toy TF32" in printed
    assert "peak:" not in progress
    assert path.read_text().startswith(before)
    assert len(read(tmp_path)) < 6  # of six; it did not go on to the end


def wait_for(program, path, text):
    while not (path.exists() and text in path.read_text()):
        assert program.poll() is None
        time.sleep(0.02)


def test_runs_that_cannot_start_are_refused(tmp_path, capsys, monkeypatch):
    gpu = load_benchmark("gpu")
    monkeypatch.setattr(sys, "path", [*sys.path])  # main changes both for its processes
    monkeypatch.setattr(os, "environ", os.environ.copy())
    (tmp_path / "results.jsonl").write_text("")
    assert gpu.main(["--device", "cpu", "--toy", "--output", str(tmp_path)]) == 2
    assert "give --resume to continue" in capsys.readouterr().err
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    assert gpu.main(["--output", str(tmp_path / "new")]) == 2
    assert "has no no_such_package" in capsys.readouterr().err


def work(message, report):
    """Of the processes below."""
    report({"batch": 1})
    if message["name"] == "hang":
        time.sleep(60)
    if message["name"] == "crash":
        signal.raise_signal(signal.SIGKILL)
    raise ValueError("no memory\nand more")


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("hang", "timed out", "not ready"),
        ("crash", "failed", "signal 9"),
        ("error", "failed", "ValueError: no memory"),
    ],
)
def test_a_crash_or_a_hang_costs_one_row(tmp_path, monkeypatch, name, status, reason):
    process = load_benchmark("gpu_process")
    processes = process.Processes([], "fork", tmp_path / "log.txt")
    monkeypatch.setitem(sys.modules, "gpu_work", sys.modules[__name__])
    outcome = processes.run("gpu_work:work", {"name": name}, limit=1 if name == "hang" else 30)
    assert (outcome.status, outcome.result) == (status, {"batch": 1})
    assert reason in outcome.reason


def test_the_share_is_relative_to_the_peak_of_the_same_precision(tmp_path):
    results = load_benchmark("gpu_results").Results(tmp_path / "results.jsonl")
    results.add({"name": "peak", "kind": "peak", "status": "done", "result": {"peaks": {"bfloat16": 800, "tf32": 400}}})
    measured = {"images_per_second": 2, "flops_per_image": 100, "loss": 1.5}
    of = {}
    for precision in ("autocast", "fp8", "tf32", "float32"):
        row = {"setting": {"name": precision, "precision": precision}, "result": measured}
        of[precision] = load_benchmark("gpu_results").share_of_peak(results, row)
    assert of == {"autocast": 0.25, "fp8": 0.25, "tf32": 0.5, "float32": None}


def test_padded_tokens_do_not_change_the_logits():
    model: Any = tiny().eval()
    expected = model(images(model)).logits
    seen = []
    model.vit.layers[0].mlp.register_forward_hook(lambda *call: seen.append(call[2].shape[1]))
    load_benchmark("gpu_steps").pad_tokens(model, 8)
    torch.testing.assert_close(model(images(model)).logits, expected, rtol=1e-5, atol=1e-5)
    assert seen[0] % 8 == 0


def test_crops_on_the_device_equal_those_of_the_training_loader():
    """PIL's bilinear transform cuts each value down to an integer, and clamps at the crop's border: both within 2."""
    module = load_benchmark("gpu_images")
    jpeg = module.make_jpegs(1, 60, 80)[0]
    picture = module._decode_one(jpeg)
    boxes = [Box(3, 5, 40, 60), Box(0, 0, 60, 80), Box(20, 30, 32, 24)]
    normalizer = Normalizer([0.0] * 3, [1 / 255] * 3, torch.device("cpu"))  # pixels stay as they are
    batch = torch.from_numpy(np.stack([picture] * len(boxes)))
    found = module.crop_flip_normalize(batch, torch.tensor(boxes).float(), 24, normalizer, None)
    for box, pixels in zip(boxes, found.permute(0, 2, 3, 1).numpy(), strict=True):
        expected = np.asarray(crop_and_resize(Image.fromarray(picture), box, (24, 24))).astype(float)
        inner = np.abs(pixels - expected)[1:-1, 1:-1]
        assert inner.max() < 2
    drawn = module.sample_boxes(1000, 60, 80, torch.Generator().manual_seed(0))
    top, left, height, width = drawn.T
    assert min(top.min(), left.min()) >= 0
    assert max((top + height).max() - 60, (left + width).max() - 80) <= 0.01
    assert ((width / height > 0.749) & (width / height < 1.331)).all()
    assert (height * width / 4800 > 0.0499).all()
