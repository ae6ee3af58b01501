"""All there is to a training run, and the error that ends one."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from .batches import Shares
from .checkpoints import Checkpoints
from .objectives import Objective
from .optimization import MovingAverage
from .schedules import Schedule
from .settings import TrainingSettings
from .stalls import Place


class TrainingStopped(RuntimeError):
    """Training cannot go on; the last checkpoint is good."""


@dataclass
class Run:
    """All there is to a training run."""

    settings: TrainingSettings
    accelerator: Accelerator
    model: torch.nn.Module  # prepared by the accelerator
    optimizer: Any  # prepared by the accelerator
    schedule: Schedule
    num_steps: int
    shares: Shares
    objective: Objective
    checkpoints: Checkpoints
    average: MovingAverage | None = None
    step: int = 0  # optimiser steps done
    best: float = -math.inf  # accuracy, or else -loss, of an evaluation
    skipped: int = 0  # unreadable images on all processes
    history: list[dict[str, float]] = field(default_factory=list)
    place: Place = field(default_factory=Place)
    waited: float = 0.0  # seconds, for the loader's batches
    metrics: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    predictions: dict[str, Any] = field(default_factory=dict)  # of the last evaluation, see `measuring.predict`
    identity: dict[str, Any] = field(default_factory=dict)  # of "data", and of the "model" that training began from

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation; None before one."""
        evaluations = self._evaluations()
        return int(max(evaluations, key=lambda pair: pair[0])[1]) if evaluations else None

    @property
    def is_stale(self) -> bool:
        """Whether the last evaluations, as many as `early_stopping` says, were no better than one before them."""
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

    def quality_of(self, metrics: dict[str, float]) -> float:
        """The number of an evaluation by which one is better than another, as `best_metric` says.

        Raises:
            TrainingStopped: there is no such metric.
        """
        name = self.settings.best_metric
        if name == "auto":
            name = "accuracy" if "accuracy" in metrics else "loss"
        if name not in metrics:
            known = [metric for metric in metrics if "/" not in metric]
            known += ["accuracy/CLASS"] if len(known) < len(metrics) else []
            raise TrainingStopped(f"--best-metric is {name}, and an evaluation has {', '.join(known)}")
        return -metrics[name] if name == "loss" else metrics[name]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's parameters by name, as they are without the accelerator's wrappers."""
        return dict(self.accelerator.unwrap_model(self.model).named_parameters())
