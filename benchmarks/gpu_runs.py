"""Rows of `gpu.py` that are whole training runs from image files, by the package's own commands."""

import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu import ROOT, TOY, Omitted
from gpu_models import make_jpegs
from safetensors.torch import load_file

from hf_vit.conversion import convert
from hf_vit.loading import save_folder

_PICTURE = (375, 500)  # pixels, ImageNet's mean size
_TOY_MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_PRETRAIN = {"mixed_precision": "bf16", "optimizer": "adamw", "learning_rate": 1e-4, "schedule": "constant"}
_PRETRAIN |= {"warmup_steps": 0, "eval_split": "none", "report_to": "none", "eval_every": 10_000, "save_every": 10_000}
# The original's short schedule for CIFAR-10, whose README reports 98.59% for ViT-B/16 from ImageNet-21k
_PAPER = {"train_split": "train", "eval_split": "test", "steps": 500, "warmup_steps": 50, "batch_size": 512}
_PAPER |= {
    "per_device_batch_size": 256,
    "image_size": 384,
    "find_batch_size": True,
    "eval_every": 500,
    "save_every": 50,
}
_PAPER |= {"eval_batch_size": 256, "mixed_precision": "bf16"}
_TOY_PAPER = {"eval_split": "test[:64]", "steps": 4, "warmup_steps": 1, "batch_size": 16, "image_size": 24}
_TOY_PAPER |= {"crop_area": "0.7,1", "flip": False, "num_workers": 0}
Report = Callable[[dict], None]


def train_from_files(message: dict, report: Report) -> dict:
    """Train as the row says; its `variant` is the model and `label` the kind of run."""
    toy, kind = message["toy"], message["label"]
    small = {"batch_size": 16, "dataset": _folder(message)}
    if kind.startswith("loop"):
        return _measure_loop(message, {"augment_on": "device" if "device" in kind else "cpu"})
    if kind == "resume":  # a run that is interrupted and resumed ends with the same bits, with --deterministic
        settings = {**small, "deterministic": True, "save_every": 3}
        _pretrain(message, "whole", {**settings, "steps": 6})
        _pretrain(message, "halves", {**settings, "steps": 3})
        _pretrain(message, "halves", {**settings, "steps": 6, "resume": True})
        files = [(_output(message, name) / "model.safetensors").read_bytes() for name in ("whole", "halves")]
        return {"equal_bits": len({hashlib.sha256(file).digest() for file in files}) == 1}
    if kind == "CPU and device":  # in float32
        settings = {**small, "batch_size": 8, "image_size": 32, "steps": 4 if toy else 20, "mixed_precision": "no"}
        _pretrain(message, "device", settings)
        _pretrain({**message, "device": "cpu"}, "cpu", settings)
        return {"largest_difference": _difference(message, "device", "cpu")}
    if message["device"] == "cpu":
        raise Omitted("fp16 needs a GPU, and Accelerate does not shard on one CPU process")
    if kind == "fp16":  # with its scaler
        settings = {**small, "batch_size": 64, "steps": 20, "mixed_precision": "fp16", "log_every": 5}
        losses = [entry["loss"] for entry in _pretrain(message, "fp16", settings)[1] if "loss" in entry]
        return {"loss": losses[-1]}
    settings = {**small, "steps": 10, "mixed_precision": "no"}  # FSDP2 on one GPU
    _pretrain(message, "plain", settings)
    template = str(ROOT / "training" / "accelerate" / "fsdp.yaml")
    launcher = ["-m", "accelerate.commands.launch", "--config_file", template, "--num_processes", "1"]
    _pretrain(message, "fsdp", settings, [*launcher, "--mixed_precision", "no"])
    return {"largest_difference": _difference(message, "plain", "fsdp")}


def _measure_loop(message: dict, settings: dict[str, Any]) -> dict:
    """Return images per second, the share of the time that waits for images, share of the peak and memory."""
    steps, batch = (6, 8) if message["toy"] else (120, 256)
    settings |= {"steps": steps, "batch_size": batch, "log_every": max(steps // 12, 1), "dataset": _folder(message)}
    settings |= {"compile": message["device"] == "cuda" and not message["toy"]}  # as in long runs
    _, entries = _pretrain(message, "loop", settings)
    measured = [entry for entry in entries if "data_wait" in entry][2:] or entries[-1:]  # after compilation
    found: dict[str, Any] = {"batch": batch}
    for name in ("images_per_second", "data_wait", "share_of_peak", "memory_gib"):
        if values := [entry[name] for entry in measured if name in entry]:
            found[name] = statistics.median(values)
    return found


def finetune_cifar10(message: dict, report: Report) -> dict:
    """Fine-tune on CIFAR-10 at 384 pixels, or continue an interrupted run, in a folder next to the results.

    At toy size, the model and the digits of the demo are used.
    """
    toy, output = message["toy"], Path(message["output"]) / "paper_row"
    given = (ROOT / "hf_vit" / "demo" / "digits.npz", "digits") if toy else (message["weights"], message["cifar10"])
    if None in given:
        raise Omitted("--weights and --cifar10 were not given")
    weights, dataset = Path(given[0]), str(given[1])
    if weights.is_file() and not (output / "model" / "config.json").exists():
        save_folder(output / "model", *convert(weights), overwrite=True)
    own = {"model": weights if weights.is_dir() else output / "model", "dataset": dataset, "report_to": "none"}
    paper = {"recipe": "finetune_table4", "select": "dataset=cifar10", **_PAPER}
    settings = _TOY_PAPER if toy else {**paper, "compile": message["device"] == "cuda"}
    began = time.perf_counter()
    settings = {**settings, **own, "resume": True, "output_dir": output / "run"}
    metrics, _ = _run(message, "finetune", settings)
    facts = {name: settings[name] for name in ("steps", "batch_size", "image_size")}
    result = {name: metrics[name] for name in ("accuracy", "samples")}
    return {
        "model": weights.name,
        "dataset": Path(dataset).name,
        **facts,
        **result,
        "seconds": time.perf_counter() - began,
    }


def _output(message: dict, name: str) -> Path:
    return Path(message["output"]) / "runs" / name


def _folder(message: dict) -> Path:
    """Return a folder of JPEGs of two classes, made once."""
    root = Path(message["output"]) / "photographs"
    if not root.exists():
        jpegs = make_jpegs(4 if message["toy"] else 64, *_PICTURE)
        draft = root.with_name("photographs.draft")
        for number in range(8 if message["toy"] else 2048):
            path = draft / ("cat", "dog")[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpegs[number % len(jpegs)])
        draft.rename(root)
    return root


def _pretrain(
    message: dict, name: str, settings: dict[str, Any], launcher: list[str] | None = None
) -> tuple[dict, list[dict]]:
    """Run `hf-vit pretrain`; return its metrics and what it logged."""
    is_toy = message["variant"] == TOY
    config = json.dumps({**_TOY_MODEL, "image_size": 32, "patch_size": 8})
    own = {"overwrite": "resume" not in settings, "output_dir": _output(message, name)}
    own |= {"config": config} if is_toy else {"variant": message["variant"]}
    return _run(message, "pretrain", {**_PRETRAIN, **own, **settings}, launcher)


def _run(
    message: dict, script: str, settings: dict[str, Any], launcher: list[str] | None = None
) -> tuple[dict, list[dict]]:
    """Run a training script; return its metrics and what it logged. SIGTERM is passed on, so that it saves."""
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}
    options = [text for name, value in texts.items() for text in (f"--{name}", value)]
    device = {"ACCELERATE_USE_CPU": "true"} if message["device"] == "cpu" else {}
    line = [sys.executable, *(launcher or []), str(ROOT / "training" / f"{script}.py"), *options]
    output = Path(settings["output_dir"])
    log = output.parent / f"{output.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(line, stdout=file, stderr=file, env={**os.environ, **device})
        signal.signal(signal.SIGTERM, lambda number, _: process.terminate())
        status = process.wait()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    text = log.read_text(encoding="utf-8")
    if status:
        raise RuntimeError(f"{script}: {(text.strip().splitlines() or ['no output'])[-1]}")
    metrics = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    return metrics, [entry for line in re.split(r"[\r\n]", text) if (entry := _logged(line))]


def _logged(line: str) -> dict[str, float]:
    """Return the values of a line of the log: `loss 0.69 ... 512 images/s, data_wait=0.01, memory_gib=3`."""
    values = {name: float(value) for name, value in re.findall(r"(\w+)=([-\d.e+]+)", line)}
    for _, loss, rate in re.findall(r"(loss) ([-\d.e+]+)|([-\d.e+]+) images/s", line):
        values["loss" if loss else "images_per_second"] = float(loss or rate)
    return values


def _difference(message: dict, name: str, other: str) -> float:
    """Return the largest difference of the weights of two runs, over the largest weight."""
    one, two = (load_file(_output(message, run) / "model.safetensors") for run in (name, other))
    largest = max(float(weight.abs().max()) for weight in one.values())
    return max(float((weight - two[key]).abs().max()) for key, weight in one.items()) / largest
