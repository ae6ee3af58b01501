"""What a run is and how far it has come, for the console, the reports and the checkpoints."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..data.splits import Split
from ..settings.fields import TrainingSettings


@dataclass
class Run:
    """What describes a run from its start to its end.

    Args:
        config: the configuration of the model.
        split, eval_split: the images for training and for evaluation, if there are any.
        num_steps: optimizer steps of the whole run; 0 for a head in closed form.
        command: the command line or the Python call.
        fingerprint: see `fingerprint_run`; from the start of training.
    """

    settings: TrainingSettings
    accelerator: Accelerator
    config: Any
    split: Split | None
    eval_split: Split | None
    num_steps: int
    command: str | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        """The output folder."""
        return Path(str(self.settings.output_dir))


@dataclass
class TrainState:
    """Progress of a run, saved in each checkpoint."""

    step: int = 0  # optimizer steps done
    best: float = -math.inf  # quality of the best evaluation (see `Trainer.quality_of`)
    best_loss: float = math.inf  # loss of the best evaluation, which decides between equal qualities
    best_step: int | None = None  # step of the best evaluation
    no_better: int = 0  # number of evaluations since the best one
    skipped: int = 0  # unreadable images, over all processes
    history: list[dict[str, float]] = field(default_factory=list)  # logged values, each entry with its "step"
    trackers: dict[str, str] = field(default_factory=dict)  # see `start_trackers`
