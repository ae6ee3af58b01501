"""State of a training run, and the error that ends one."""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from ..data.samplers import BatchLayout
from .checkpoints import Checkpoints
from .fsdp import sharded_parameters
from .objectives import Objective
from .optimization import MovingAverage
from .schedules import Schedule
from .settings import TrainingSettings
from .stalls import Place


class TrainingStopped(RuntimeError):
    """Error after which training cannot continue; the last checkpoint is good."""


def in_words(best: Mapping[str, Any]) -> str:
    """Describe the result of `Run.best_evaluation`: "91.20% after step 300"; any other metric has its name."""
    name, value = best["best_metric"], best["best"]
    shown = f"{value:.2%}" if name == "accuracy" else f"{name} {value:.4g}"
    return f"{shown} after step {best['best_step']:,}"


@dataclass
class Run:
    """Settings, parts and progress of a training run."""

    settings: TrainingSettings
    accelerator: Accelerator
    model: torch.nn.Module  # prepared by the accelerator
    optimizer: Any  # prepared by the accelerator
    schedule: Schedule
    num_steps: int
    shares: BatchLayout
    objective: Objective
    checkpoints: Checkpoints
    average: MovingAverage | None = None
    step: int = 0  # optimiser steps done
    best: float = -math.inf  # quality of the best evaluation, see `quality_of`
    skipped: int = 0  # unreadable images on all processes
    history: list[dict[str, float]] = field(default_factory=list)
    place: Place = field(default_factory=Place)
    waited: float = 0.0  # seconds of waiting for the loader's batches
    metrics: dict[str, float] = field(default_factory=dict)  # those of the last evaluation
    predictions: dict[str, Any] = field(default_factory=dict)  # those of the last evaluation, see `measuring.predict`
    identity: dict[str, Any] = field(default_factory=dict)  # that of the "data" and of the initial "model"

    @property
    def best_step(self) -> int | None:
        """Step of the best evaluation; None before the first one."""
        evaluations = self._evaluations()
        return int(max(evaluations, key=lambda pair: pair[0])[1]) if evaluations else None

    @property
    def is_stale(self) -> bool:
        """Tell whether the last `early_stopping` evaluations were no better than an earlier one."""
        patience, qualities = self.settings.early_stopping, [quality for quality, _ in self._evaluations()]
        if patience is None or not qualities:
            return False
        return len(qualities) > qualities.index(max(qualities)) + patience

    def _evaluations(self) -> list[tuple[float, float]]:
        """(quality, step) of the evaluations so far."""
        named = [
            ({name.removeprefix("eval_"): value for name, value in entry.items()}, entry["step"])
            for entry in self.history
            if "eval_loss" in entry
        ]
        return [(self.quality_of(metrics), step) for metrics, step in named]

    def best_evaluation(self) -> dict[str, Any]:
        """Return "best", the value of the "best_metric", and the "best_step"; None without an evaluation."""
        evaluated = next((entry for entry in reversed(self.history) if "eval_loss" in entry), None)
        if evaluated is None or not math.isfinite(self.best):
            return {"best": None, "best_metric": None, "best_step": None}
        name = self._metric_among({name.removeprefix("eval_") for name in evaluated})
        return {"best": -self.best if name == "loss" else self.best, "best_metric": name, "best_step": self.best_step}

    def _metric_among(self, metrics: Container[str]) -> str:
        """Name of the metric that decides: that of `best_metric`, where "auto" is accuracy, else the loss."""
        name = self.settings.best_metric
        return name if name != "auto" else "accuracy" if "accuracy" in metrics else "loss"

    def quality_of(self, metrics: dict[str, float]) -> float:
        """Return the quality of an evaluation by `best_metric`; higher is better.

        Raises:
            TrainingStopped: the evaluation has no such metric.
        """
        name = self._metric_among(metrics)
        if name not in metrics:
            known = [metric for metric in metrics if "/" not in metric]
            known += ["accuracy/CLASS"] if len(known) < len(metrics) else []
            raise TrainingStopped(f"--best-metric is {name}, but an evaluation has {', '.join(known)}")
        return -metrics[name] if name == "loss" else metrics[name]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's parameters by name, without the accelerator's wrappers; DTensors if they are sharded."""
        return sharded_parameters(self.accelerator.unwrap_model(self.model))
