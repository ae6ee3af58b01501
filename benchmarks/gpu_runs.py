"""Rows of `gpu.py` that are whole training runs from image files, by the package's own commands."""

import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_images import make_jpegs
from gpu_process import LeftOut
from gpu_rows import TOY
from safetensors.torch import load_file

_ROOT = Path(__file__).resolve().parents[1]
_PICTURE = (375, 500)  # pixels, ImageNet's mean size
_TOY_MODEL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
Report = Callable[[dict], None]


def measure(message: dict, report: Report) -> dict:
    """Train as the row says; its `variant` is the model and `run` the kind of run."""
    return _RUNS[message["run"]](message, report)


def _loop(message: dict, report: Report, **settings: Any) -> dict:
    """Speed of the training loop: images per second, and the share of the time that it waits for images."""
    steps, batch = (6, 8) if message["toy"] else (120, 256)
    metrics, entries = _train(
        message,
        "loop",
        steps=steps,
        batch_size=batch,
        log_every=max(steps // 12, 1),
        dataset=_folder(message),
        **settings,
    )
    measured = [entry for entry in entries if "data_wait" in entry][2:] or entries[-1:]  # after compilation
    found = {
        name: statistics.median(entry[name] for entry in measured if name in entry)
        for name in ("images_per_second", "data_wait", "share_of_peak", "memory_gib")
        if any(name in entry for entry in measured)
    }
    return {"batch": batch, "steps": steps, **found, "seconds": metrics["train_seconds"]}


def _loop_on_device(message: dict, report: Report) -> dict:
    return _loop(message, report, augment_on="device")


def _resume(message: dict, report: Report) -> dict:
    """Whether a run that is interrupted and resumed ends with the same bits, with --deterministic."""
    settings = {"dataset": _folder(message), "batch_size": 16, "deterministic": True, "save_every": 3}
    _train(message, "whole", steps=6, **settings)
    _train(message, "halves", steps=3, **settings)
    report({"half": True})
    _train(message, "halves", steps=6, resume=True, **settings)
    sums = [hashlib.sha256((_output(message, name) / "model.safetensors").read_bytes()) for name in ("whole", "halves")]
    return {"equal_bits": sums[0].digest() == sums[1].digest()}


def _agree(message: dict, report: Report) -> dict:
    """Difference of the weights after 20 steps in float32 on the CPU and on the device, over the largest weight."""
    steps = 4 if message["toy"] else 20
    settings = {"dataset": _folder(message), "batch_size": 8, "image_size": 32, "steps": steps, "mixed_precision": "no"}
    _train(message, "device", **settings)
    _train({**message, "device": "cpu"}, "cpu", **settings)
    return {"largest_difference": _difference(message, "device", "cpu")}


def _fp16(message: dict, report: Report) -> dict:
    """Loss of a run with mixed precision fp16 and its scaler."""
    if message["device"] == "cpu":
        raise LeftOut("fp16 needs a GPU")
    _, entries = _train(
        message, "fp16", dataset=_folder(message), batch_size=64, steps=20, mixed_precision="fp16", log_every=5
    )
    return {"losses": [entry["loss"] for entry in entries if "loss" in entry]}


def _fsdp(message: dict, report: Report) -> dict:
    """Difference of a run with FSDP2 on one GPU from one without, in float32, over the largest weight."""
    if message["device"] == "cpu":
        raise LeftOut("Accelerate does not shard on one CPU process")
    settings = {"dataset": _folder(message), "batch_size": 16, "steps": 10, "mixed_precision": "no"}
    _train(message, "plain", **settings)
    config = str(_ROOT / "training" / "accelerate" / "fsdp.yaml")
    launcher = ["-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "1"]
    _train(message, "fsdp", [*launcher, "--mixed_precision", "no"], **settings)
    return {"largest_difference": _difference(message, "plain", "fsdp")}


_RUNS = {
    "loop": _loop,
    "loop, augmentation on the device": _loop_on_device,
    "resume": _resume,
    "CPU and device": _agree,
    "fp16": _fp16,
    "FSDP2": _fsdp,
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


def _train(message: dict, name: str, launcher: list[str] | None = None, **settings: Any) -> tuple[dict, list[dict]]:
    """Run `hf-vit pretrain`; return its metrics and what it logged."""
    output = _output(message, name)
    if message["variant"] == TOY:
        model = {"config": json.dumps({**_TOY_MODEL, "image_size": 32, "patch_size": 8})}
    else:
        model = {"variant": message["variant"]}
    shared = {"mixed_precision": "bf16", "optimizer": "adamw", "learning_rate": 1e-4, "schedule": "constant"}
    shared |= {"warmup_steps": 0, "eval_split": "none", "report_to": "none", "eval_every": 10_000, "save_every": 10_000}
    given = {**model, **shared, "overwrite": "resume" not in settings, "output_dir": output, **settings}
    words = {option: str(value).lower() if isinstance(value, bool) else str(value) for option, value in given.items()}
    options = [text for option, word in words.items() for text in (f"--{option}", word)]
    script = str(_ROOT / "training" / "pretrain.py")
    device = {"ACCELERATE_USE_CPU": "true"} if message["device"] == "cpu" else {}
    done = subprocess.run(
        [sys.executable, *(launcher or []), script, *options],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, **device},
    )
    print(done.stdout, done.stderr)
    if done.returncode:
        raise RuntimeError(f"pretrain: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    metrics = json.loads((output / "metrics.json").read_text(encoding="utf-8"))
    return metrics, [entry for line in re.split(r"[\r\n]", done.stderr) if (entry := _logged(line))]


def _logged(line: str) -> dict[str, float]:
    """Return the values of a line of the log: `loss 0.69 ... 512 images/s, data_wait=0.01, memory_gib=3`."""
    values = {name: float(value) for name, value in re.findall(r"(\w+)=([-\d.e+]+)", line)}
    named = re.findall(r"(loss) ([-\d.e+]+)|([-\d.e+]+) images/s", line)
    for _, loss, rate in named:
        values["loss" if loss else "images_per_second"] = float(loss or rate)
    return values


def _difference(message: dict, name: str, other: str) -> float:
    """Return the largest difference of the weights of two runs, over the largest weight."""
    one, two = (load_file(_output(message, run) / "model.safetensors") for run in (name, other))
    largest = max(float(weight.abs().max()) for weight in one.values())
    return max(float((weight - two[key]).abs().max()) for key, weight in one.items()) / largest
