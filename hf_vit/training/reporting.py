"""What a run says about itself: the progress bar, trackers, the learning curve, metrics and facts for a model card."""

import datetime
import logging
import platform
import shlex
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm

from ..files.output import new_file
from ..files.versions import versions_of
from .settings import TrainingSettings

logger = logging.getLogger(__name__)
_PACKAGES = ("hf_vit", "torch", "transformers", "accelerate", "datasets")


def choose_trackers(report_to: str) -> list[str]:
    """The trackers of `accelerate` to log with: "auto" is TensorBoard where it is installed."""
    if report_to == "auto":
        return ["tensorboard"] if find_spec("tensorboard") or find_spec("tensorboardX") else []
    chosen = [name.strip() for name in report_to.split(",") if name.strip() != "none"]
    for name in chosen:
        if name not in ("tensorboard", "trackio", "wandb"):
            raise ValueError(f"report_to is {name!r}; it must be auto, tensorboard, trackio, wandb or none")
        if not find_spec(name):
            raise ValueError(f"report_to is {name}, which is not installed: pip install {name}")
    return chosen


class Report:
    """Progress of one run, on the main process; the history survives in checkpoints."""

    def __init__(
        self, accelerator: Accelerator, settings: TrainingSettings, num_steps: int, start_step: int, history: list[dict]
    ):
        self.accelerator, self.settings, self.history = accelerator, settings, history
        self.tracking = bool(accelerator.log_with)
        self.started, self.start_step = time.perf_counter(), start_step
        self.bar = tqdm(
            total=num_steps,
            initial=start_step,
            unit="step",
            disable=not accelerator.is_main_process,
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 30,  # a log file needs no animation
        )
        if self.tracking:
            self._safely(accelerator.init_trackers, "training", config=_loggable(settings))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record values after `step` optimiser steps."""
        seconds = time.perf_counter() - self.started
        speed = (step - self.start_step) * self.settings.batch_size / seconds
        self.history.append({"step": step, **values})
        shown = {"images/s": f"{speed:.1f}", **{name: f"{value:.4g}" for name, value in values.items()}}
        self.bar.set_postfix(shown, refresh=False)
        if self.tracking:
            self._safely(self.accelerator.log, {**values, "images_per_second": speed}, step=step)

    def totals(self, skipped: int) -> dict[str, float]:
        """What the run took, since it was started or resumed."""
        seconds = time.perf_counter() - self.started
        images = (self.bar.n - self.start_step) * self.settings.batch_size
        return {"train_seconds": seconds, "train_images_per_second": images / seconds, "train_images_skipped": skipped}

    def _safely(self, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """A tracker that fails stops reporting, not the training."""
        try:
            function(*arguments, **options)
        except Exception as error:
            self.tracking = False
            logger.warning(f"The tracker failed ({error}); training goes on without it.")


def _loggable(settings: TrainingSettings) -> dict[str, int | float | str | bool]:
    """TensorBoard takes nothing else."""
    return {k: v if isinstance(v, int | float | str) else str(v) for k, v in vars(settings).items()}


def write_curve(history: list[dict], path: Path) -> None:
    """Draw the learning curve, where matplotlib is installed."""
    if not find_spec("matplotlib"):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.5), layout="constrained")
    panels = (("loss", "eval_loss"), ("accuracy", "eval_accuracy"), ("learning_rate",))
    for axes, names in zip(figure.subplots(1, 3), panels, strict=True):
        for name in names:
            points = [(entry["step"], entry[name]) for entry in history if name in entry]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, marker="." if name.startswith("eval") else None)
        axes.set_xlabel("optimiser step")
        axes.set_title(names[0].replace("_", " "))
        if axes.lines:
            axes.legend()
    with new_file(path, overwrite=True) as file:
        figure.savefig(file, dpi=120)


def card_data(settings: TrainingSettings, metrics: dict[str, Any], accelerator: Accelerator) -> dict[str, Any]:
    """Facts about a run for a model card."""
    device = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else platform.processor()
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "base_model": getattr(settings, "model", None),
        "dataset": settings.dataset,
        "train_split": settings.train_split,
        "eval_split": settings.eval_split,
        "settings": {name: value for name, value in vars(settings).items() if name != "output_dir"},
        "metrics": metrics,
        "processes": accelerator.num_processes,
        "device": f"{accelerator.device.type} {device}".strip(),
        "versions": versions_of(_PACKAGES),
    }
