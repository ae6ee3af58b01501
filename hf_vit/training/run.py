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
        qualities = [
            (entry.get("eval_accuracy", -entry["eval_loss"]), entry["step"])
            for entry in self.history
            if "eval_loss" in entry
        ]
        return int(max(qualities, key=lambda pair: pair[0])[1]) if qualities else None

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's parameters by name, as they are without the accelerator's wrappers."""
        return dict(self.accelerator.unwrap_model(self.model).named_parameters())
