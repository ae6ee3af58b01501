"""Table of the protocols of evaluation, by their names for `--protocol`."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator

from ..training.settings import EvaluateSettings
from . import classification, few_shot, linear_probe, nearest_neighbors, vtab

PROTOCOLS: dict[str, Callable[[EvaluateSettings, Accelerator], dict[str, Any]]] = {
    "accuracy": classification.evaluate,
    "real": classification.evaluate_real,
    "objectnet": classification.evaluate_objectnet,
    "few_shot": few_shot.evaluate,
    "linear_probe": linear_probe.evaluate,
    "knn": nearest_neighbors.evaluate,
    "vtab": vtab.evaluate,
}
