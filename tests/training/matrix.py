"""Every kind of training run with every launcher, on CPU processes over gloo, compared with one process.

Used by test_matrix.py and benchmarks/launchers.py. All runs of a launcher share its processes. A run
takes two steps of eight images, then resumes and takes the third; it evaluates and saves after each step.
"""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..processes import LIMIT, MODEL, arguments, environment, through, weights
from ..tiny_models import save_tiny

ONE = "one process"
LAUNCHERS: dict[str, tuple[str, int, list[str]]] = {  # name: template, processes, options
    ONE: ("cpu", 1, []),
    "DDP, 2 processes": ("multi_gpu", 2, ["--main_process_port", "0"]),
    "FSDP2, 2 processes": ("fsdp", 2, ["--main_process_port", "0"]),
    "HSDP, 2 x 2 processes": ("hsdp", 4, ["--main_process_port", "0", "--parallelism_config_dp_shard_size", "2"]),
    "simulated TPU": ("tpu", 1, []),
    "simulated TPU, DDP, 2 processes": ("tpu", 2, ["--main_process_port", "0"]),
}
EVERY_RUN = {"batch_size": 8, "per_device_batch_size": 2, "learning_rate": 0.01, "schedule": "constant"}
EVERY_RUN |= {"warmup_steps": 0, "eval_every": 1, "save_every": 1, "log_every": 1, "eval_batch_size": 4}
EVERY_RUN |= {"best_metric": "accuracy", "num_workers": 0, "report_to": "none", "eval_split": "train[5:12]", "seed": 1}
NATIVE = {"preset": "native", "token_drop": 0.3}
ADAMW = {"optimizer": "adamw", "adam_epsilon": 1e-3, "weight_decay": 0.1}  # 0 / 0 at 1e-8
MASKED = {"objective": "masked_patch_prediction", "best_metric": "patch_accuracy", "config": json.dumps(MODEL)}
KINDS: dict[str, dict[str, Any]] = {  # settings of each kind of run
    "EMA": {"ema_decay": 0.5},
    "native": NATIVE,
    "native, EMA": {**NATIVE, "ema_decay": 0.5},
    "FlexiViT": {"patch_sizes": "2,4", "ema_decay": 0.5, "best_metric": "accuracy_at_patch_4"},
    "LoRA": {"lora_rank": 2},
    "masked patches": MASKED,
    "balanced": {"class_sampling": "balanced"},
    "Muon": {**MASKED, "optimizer": "muon", "adam_epsilon": 1e-3},  # gradients of full rank
    "SGD, bfloat16 momentum": {"momentum_dtype": "bfloat16"},
    "AdamW, bfloat16 momentum": {**ADAMW, "momentum_dtype": "bfloat16"},
    "checkpointing": {"gradient_checkpointing": "true"},
    "find batch size": {"find_batch_size": "true", "per_device_batch_size": "none"},  # see launched_runs.py
    "distillation": {"teacher": "teacher", "teacher_temperature": 2, "mixup_alpha": 0.5, "ema_decay": 0.5},
    "accumulation": {"per_device_batch_size": 1},
}


def write_inputs(work: Path) -> None:
    """Write a tiny model, and two classes of images of different sizes."""
    rng = np.random.default_rng(0)
    for name, count in {"cat": 9, "dog": 5}.items():
        (work / "images" / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 255, (*rng.integers(8, 60, 2), 3))
            Image.fromarray(pixels.astype(np.uint8)).save(work / "images" / name / f"{number}.png")
    save_tiny(work / "model")
    names = {"num_labels": 2, "id2label": {0: "dog", 1: "cat"}, "label2id": {"dog": 0, "cat": 1}}
    save_tiny(work / "teacher", seed=1, image_size=(40, 72), **names)


def train(launcher: str, precision: str, kinds: Iterable[str], work: Path) -> None:
    """Train each kind with a launcher; the folder of a kind is `output_of(...)`.

    Args:
        precision: "no" or "bf16".

    Raises:
        AssertionError: a run failed.
    """
    template, processes, options = LAUNCHERS[launcher]
    lines = []
    for kind in kinds:
        settings = {"dataset": work / "images", **EVERY_RUN, **KINDS[kind]}
        settings |= {} if "config" in settings else {"model": work / "model"}
        settings |= {"teacher": work / "teacher"} if "teacher" in settings else {}
        settings |= {"compile": "false"} if launcher.startswith("simulated TPU") else {}  # it has no compiler
        if launcher == ONE and kind == "accumulation":
            settings["per_device_batch_size"] = settings["batch_size"]
        script = "pretrain" if "config" in settings else "finetune"
        output = output_of(launcher, precision, kind, work)
        for steps in (2, 3):
            lines.append([script, *arguments(**settings, steps=steps, resume=steps == 3, output_dir=output)])
    runs = work / f"{name_of(launcher)}_{precision}.json"
    runs.write_text(json.dumps(lines))
    line = through(template, processes, runs, *options, "--mixed_precision", precision)
    variables = environment()
    if launcher.startswith("simulated TPU"):  # see simulated_tpu.py
        variables |= {"ACCELERATE_USE_CPU": "false", "SIMULATED_TPU": "1"}
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=2 * LIMIT)
    assert done.returncode == 0, f"{launcher}: {done.stderr[-6000:]}"


def output_of(launcher: str, precision: str, kind: str, work: Path) -> Path:
    return work / name_of(launcher) / precision / name_of(kind)


def name_of(launcher_or_kind: str) -> str:
    """Return the name of its files."""
    return launcher_or_kind.replace(", ", "_").replace(" ", "_")


def difference(launcher: str, precision: str, kind: str, work: Path) -> float:
    """Largest difference of a run's final weights from those in one process, relative to the largest weight."""
    ours, theirs = (weights(output_of(one, precision, kind, work)) for one in (launcher, ONE))
    assert ours.keys() == theirs.keys()
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    return max(float((ours[name] - tensor).abs().max()) for name, tensor in theirs.items()) / largest
