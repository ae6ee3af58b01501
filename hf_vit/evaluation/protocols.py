"""`hf_vit.evaluate`, the table of its protocols, and their metrics as text."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..files.output import write_json
from ..loading import check_name
from ..settings.fields import EvaluateSettings, Protocol
from ..settings.recipes import build_settings
from ..training.launch import start_accelerator
from . import classification, features, vtab

PROTOCOLS: dict[str, Callable[[EvaluateSettings, Accelerator], dict[str, Any]]] = {
    "accuracy": classification.evaluate,
    "real": classification.evaluate_real,
    "objectnet": classification.evaluate_objectnet,
    "few_shot": features.evaluate_few_shot,
    "linear_probe": features.evaluate_linear_probe,
    "knn": features.evaluate_nearest_neighbors,
    "vtab": vtab.evaluate,
}


def evaluate(
    model: str | os.PathLike[str],
    dataset: str | os.PathLike[str] | None = None,
    protocol: Protocol = "accuracy",
    split: str | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Evaluate a saved model by one of several protocols, as `hf-vit evaluate` does.

    Args:
        model: name on the Hub, or a folder.
        dataset: a folder with a folder of images for each class, a name on the Hub, or parquet or tar files.
        protocol: accuracy, real, objectnet, few_shot, linear_probe, knn or vtab (docs/evaluate.md).
        split: split to evaluate on; by default test, else the images that the model's training held out.
        output_dir: folder of the metrics, and of report.html and predictions.csv; None: nothing is written.
        settings: other fields of `EvaluateSettings`, such as `image_size=384`; `hf-vit evaluate --help` explains each.

    Returns:
        The metrics of the protocol; of "accuracy": "loss", "accuracy", "top5_accuracy" with 5 classes or more,
        "mean_per_class_accuracy", "samples" and "skipped".

    Raises:
        ValueError: a setting is unknown or wrong, or does not fit model or data.

    Example:
        >>> hf_vit.evaluate("out", "photographs", split="test")["accuracy"]
    """
    check_name(model)
    own = {"model": model, "dataset": dataset, "output_dir": output_dir}
    own = {name: None if value is None else str(value) for name, value in own.items()}
    return run_protocol(build_settings(EvaluateSettings, {**settings, **own, "protocol": protocol, "split": split}))


def run_protocol(settings: EvaluateSettings) -> dict[str, Any]:
    """Evaluate a model by the chosen protocol; write and return the metrics."""
    accelerator = start_accelerator(settings)  # processes, device and precision of `accelerate launch`
    metrics = PROTOCOLS[settings.protocol](settings, accelerator)
    if accelerator.is_main_process and settings.output_dir:
        name = "metrics" if settings.protocol == "accuracy" else settings.protocol
        write_json(Path(settings.output_dir) / f"{name}.json", metrics)
    return metrics


def summarize(metrics: Mapping[str, Any]) -> str:
    """Format metrics as lines with a name and a value; accuracies are in percent."""
    rows = list(_rows(metrics, ""))
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _rows(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            label = {"samples": "images"}.get(key, key.replace("_", " "))
            yield from _rows(entry, f"{name} {label}".strip())
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):  # a row for each number of shots
        for entry in value:
            (what, number), *rest = entry.items()
            yield from _rows(dict(rest), f"{number} {what}")
    elif not (name.endswith("skipped") and value == 0):
        values = value if isinstance(value, list) else [value]
        yield name, ", ".join(_text(name, one) for one in values)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if "accuracy" in name or name.endswith("spread"):
        return f"{100 * value:.2f}%"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
