"""Row of `gpu.py` from the paper: fine-tuning on CIFAR-10 at 384 pixels, with the package's training command.

The original repository reports 98.59 % for ViT-B/16 from ImageNet-21k after 500 steps of 512, 50 of them warm-up.
At toy size, the model and the digits of `python -m hf_vit.demo` are used.
"""

import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_process import LeftOut

from hf_vit.conversion import convert
from hf_vit.loading import save_folder

_ROOT = Path(__file__).resolve().parents[1]
_STEPS = 500
_PER_DEVICE = 256  # images per forward at 384 pixels
_NEEDED = ("accelerate", "datasets", "evaluate", "matplotlib")


def finetune(message: dict, report: Callable[[dict], None]) -> dict:
    """Fine-tune, or continue an interrupted run, in a folder beside the results.

    Raises:
        LeftOut: weights, images or a package for training are missing.
    """
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise LeftOut(f"training needs {' and '.join(missing)}, which is not installed")
    toy, output = message["toy"], Path(message["output"]) / "paper_row"
    weights = _ROOT / "hf_vit" / "demo" / "digits.npz" if toy else _path_of(message, "weights")
    dataset = "digits" if toy else str(_path_of(message, "cifar10"))
    model = _as_folder(weights, output / "model")
    run = output / "run"
    settings = _toy_settings() if toy else _settings(message["device"])
    settings |= {"model": model, "dataset": dataset, "output_dir": run, "report_to": "none"}
    if (run / "recipe.yaml").exists():
        settings["resume"] = "true"
    report({"model": weights.name, "dataset": dataset})
    began = time.perf_counter()
    metrics = _run_command(settings)
    return {
        "model": weights.name,
        "dataset": Path(dataset).name,
        "steps": settings["steps"],
        "batch_size": settings["batch_size"],
        "image_size": settings["image_size"],
        "seconds": time.perf_counter() - began,
        "resumed": "resume" in settings,
        **{name: metrics[name] for name in ("accuracy", "samples")},
        "metrics": {name: value for name, value in metrics.items() if isinstance(value, (int, float))},
    }


def _path_of(message: dict, name: str) -> Path:
    if not message.get(name):
        raise LeftOut(f"--{name} was not given")
    return Path(message[name]).resolve()


def _as_folder(weights: Path, folder: Path) -> Path:
    """Return a folder in the package's format; other checkpoint files are converted."""
    if weights.is_dir():
        return weights
    if not (folder / "config.json").exists():
        model, processor = convert(weights)
        save_folder(folder, model, processor, overwrite=True)
    return folder


def _settings(device: str) -> dict[str, object]:
    """Return the settings of the original's short schedule, in bfloat16 and compiled."""
    return {
        "recipe": _ROOT / "training" / "recipes" / "finetune_cifar10.yaml",
        "train_split": "train",
        "eval_split": "test",
        "steps": _STEPS,
        "warmup_steps": _STEPS // 10,
        "batch_size": 512,
        "per_device_batch_size": _PER_DEVICE,
        "image_size": 384,
        "find_batch_size": "true",
        "eval_every": _STEPS,
        "save_every": 50,
        "eval_batch_size": _PER_DEVICE,
        "mixed_precision": "bf16",
        "compile": "true" if device == "cuda" else "false",
    }


def _toy_settings() -> dict[str, object]:
    return {
        "eval_split": "test[:64]",
        "steps": 4,
        "warmup_steps": 1,
        "batch_size": 16,
        "image_size": 24,
        "crop_area": "0.7,1",
        "flip": "false",
        "num_workers": 0,
    }


def _run_command(settings: dict[str, object]) -> dict:
    """Run `hf-vit finetune` in this process; return its metrics."""
    spec: Any = importlib.util.spec_from_file_location("finetune", _ROOT / "training" / "finetune.py")
    script = importlib.util.module_from_spec(spec)  # hf_vit.scripts exists only in an installed package
    spec.loader.exec_module(script)

    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    script.finetune([text for name, value in settings.items() for text in (f"--{name}", str(value))])
    return json.loads((Path(str(settings["output_dir"])) / "metrics.json").read_text(encoding="utf-8"))
