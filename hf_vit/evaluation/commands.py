"""`evaluate` from beginning to end: the page behind `training/evaluate.py` and `hf-vit evaluate`."""

import json
from pathlib import Path
from typing import Any

from ..files.output import write_json
from ..training.assembly import start
from ..training.commands import finetune_on, show
from ..training.recipes import parse_settings
from ..training.settings import EvaluateSettings
from . import classification, few_shot, linear_probe, nearest_neighbors, vtab

PROTOCOLS = {
    "accuracy": classification.evaluate,
    "real": classification.evaluate_real,
    "objectnet": classification.evaluate_objectnet,
    "few_shot": few_shot.evaluate,
    "linear_probe": linear_probe.evaluate,
    "knn": nearest_neighbors.evaluate,
}


def evaluate(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure a saved model by the protocol that the settings name; return the metrics and print them as JSON."""
    settings = parse_settings(EvaluateSettings, argv)
    if settings.print_config:
        return show(settings)
    accelerator = start(settings)
    if settings.protocol == "vtab":
        metrics = vtab.evaluate(settings, accelerator, finetune_on)
    else:
        metrics = PROTOCOLS[settings.protocol](settings, accelerator)
    if accelerator.is_main_process and settings.output_dir:
        name = "metrics" if settings.protocol == "accuracy" else settings.protocol
        write_json(Path(settings.output_dir) / f"{name}.json", metrics)
    accelerator.print(json.dumps(metrics, indent=2))
    accelerator.end_training()
    return metrics
