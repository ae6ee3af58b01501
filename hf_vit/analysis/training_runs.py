"""The compute of training runs: what a run costs, what the paper printed, and tables of runs to draw."""

import csv
import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..models.variants import VARIANTS, config_of_variant
from .compute import FLOPS_PER_MULTIPLY_ADD, count_with_padding

# A step costs three forwards: one, and a backward of twice its cost. With this the exaFLOPs of the paper come out.
_FORWARDS_PER_STEP = 3
# Share of the peak at which the paper's three ViTs of Table 2 ran: 32, 43 and 39 %, from their TPUv3-core-days.
UTILIZATION = 0.38
_SECONDS_PER_DAY = 86_400


class Run(NamedTuple):
    """One trained model, as a point of `plot_compute_accuracy`."""

    name: str
    family: str  # "ViT", "Hybrid", "ResNet", ...
    exaflops: float
    accuracy: float  # percent


@cache
def published() -> dict[str, Any]:
    """What published.yaml says."""
    return yaml.safe_load(files("hf_vit.analysis").joinpath("published.yaml").read_text(encoding="utf-8"))


def training_exaflops(multiply_adds: float, epochs: float, dataset_size: float) -> float:
    """Compute of a training run in 1e18 floating-point operations, as the paper counts it.

    Args:
        multiply_adds: of a forward of one image.
        dataset_size: images per epoch.

    Raises:
        ValueError: a negative number.
    """
    for name, value in (("epochs", epochs), ("dataset_size", dataset_size)):
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must not be negative")
    return _FORWARDS_PER_STEP * FLOPS_PER_MULTIPLY_ADD * multiply_adds * epochs * dataset_size / 1e18


def accelerator_days(exaflops: float, accelerator: str = "tpu-v3-core", utilization: float = UTILIZATION) -> float:
    """How many days one accelerator takes.

    Args:
        accelerator: a key of `published()["accelerators"]`.
        utilization: the share of its peak at which it runs, in (0, 1].
    """
    known = published()["accelerators"]
    if accelerator not in known:
        raise ValueError(f"unknown accelerator {accelerator!r}; known: {', '.join(known)}")
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization is {utilization}; it must be above 0 and at most 1")
    return exaflops * 1e18 / (float(known[accelerator]["flops"]) * utilization * _SECONDS_PER_DAY)


def table_rows(number: int) -> list[dict[str, Any]]:
    """Rows of Table 2 or 6 of the paper, with what is computed here beside.

    Returns:
        For each row `model`, `dataset`, `epochs`, `source`, what the table prints by column, and in exaFLOPs `computed`
        and `computed_without_padding` (see `count_with_padding`), which are None for a model that is none of this
        package or was trained otherwise.
    """
    return [{**row, **_computed(row)} for row in _printed_rows(number)]


def _printed_rows(number: int) -> list[dict[str, Any]]:
    table, rows = published()[f"table_{number}"], []
    for row in table["rows"]:
        row = {"dataset": table.get("dataset"), "epochs": None, "source": table["source"], **row}
        printed = dict(zip(table["columns"], row.pop("printed"), strict=True))
        rows.append({**row, **printed})
    return rows


def _computed(row: Mapping[str, Any]) -> dict[str, float | None]:
    names = ("computed", "computed_without_padding")
    dataset = published()["datasets"].get(row["dataset"])
    if dataset is None or row["epochs"] is None or row["model"] not in VARIANTS:
        return dict.fromkeys(names)
    counts = _count(row["model"], dataset["classes"])
    images = float(dataset["images"])
    return {name: training_exaflops(count, row["epochs"], images) for name, count in zip(names, counts, strict=True)}


@cache
def _count(model: str, classes: int) -> tuple[int, int]:
    """Multiply-adds of an image, with and without those on padding."""
    multiply_adds, on_padding = count_with_padding(config_of_variant(model, num_labels=classes))
    return multiply_adds, multiply_adds - on_padding


def published_runs(metric: str = "ImageNet") -> list[Run]:
    """Table 6 as the runs of Figure 5."""
    return [Run(row["model"], _family_of(row["model"]), row["exaFLOPs"], row[metric]) for row in _printed_rows(6)]


def _family_of(model: str) -> str:
    """ "R50+B/16" is a hybrid, "R50x1" a ResNet, "B/16" a ViT."""
    return "Hybrid" if "+" in model else "ViT" if "/" in model else "ResNet"


def read_runs(path: str | os.PathLike) -> list[Run]:
    """Runs of a CSV file with the columns `name`, `exaflops` and `accuracy` (percent), and perhaps `family`.

    Raises:
        ValueError: a column is missing, or a value is not a number above 0; the message names the line.
    """
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        if missing := {"name", "exaflops", "accuracy"} - set(reader.fieldnames or []):
            raise ValueError(
                f"{path} has no column {', '.join(sorted(missing))}; it has {', '.join(reader.fieldnames or [])}"
            )
        runs = [_read_run(row, f"{path}, line {reader.line_num}") for row in reader]
    if not runs:
        raise ValueError(f"{path} has no runs")
    return runs


def _read_run(row: Mapping[str, str], place: str) -> Run:
    numbers = {}
    for column in ("exaflops", "accuracy"):
        try:
            numbers[column] = float(row[column])
        except (TypeError, ValueError):
            raise ValueError(f"{place}: {column} is {row[column]!r}, not a number") from None
        if not 0 < numbers[column] < float("inf"):
            raise ValueError(f"{place}: {column} is {row[column]}; it must be above 0")
    return Run(row["name"], row.get("family") or _family_of(row["name"]), **numbers)
