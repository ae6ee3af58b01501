"""Compute of training runs: by formula, as printed in the paper, and from tables of runs."""

import csv
import math
import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..models.utils import check_choice
from ..variants import VARIANTS, config_of_variant
from .compute import FLOPS_PER_MULTIPLY_ADD, count_with_padding

# A step costs a forward and a backward of twice its cost. This reproduces the paper's exaFLOPs.
_FORWARDS_PER_STEP = 3
# Mean share of the peak in the paper's Table 2: 32, 43 and 39% for its three ViTs, from their TPUv3-core-days.
UTILIZATION = 0.38
_SECONDS_PER_DAY = 86_400
_COLUMNS = "expected columns name, exaflops, accuracy and, optionally, family"


class Run(NamedTuple):
    """A trained model, as a point of `plot_compute_accuracy`."""

    name: str
    family: str  # "ViT", "Hybrid", "ResNet", ...
    exaflops: float
    accuracy: float  # percent


@cache
def published() -> dict[str, Any]:
    """Read published.yaml: the paper's tables, data sets and accelerators."""
    return yaml.safe_load(files("hf_vit.analysis").joinpath("published.yaml").read_text(encoding="utf-8"))


def training_exaflops(multiply_adds: float, epochs: float, dataset_size: float) -> float:
    """Return the compute of a training run in exaFLOPs (1e18 floating-point operations), as counted in the paper.

    Args:
        multiply_adds: multiply-adds of a forward of one image.
        epochs: number of passes over the data set.
        dataset_size: images per epoch.

    Raises:
        ValueError: a number is negative.

    Example:
        >>> from hf_vit.analysis import training_exaflops
        >>> f"{training_exaflops(17.6e9, epochs=7, dataset_size=303e6):.0f}"
        '224'
    """
    for name, value in (("epochs", epochs), ("dataset_size", dataset_size)):
        if not value >= 0:
            raise ValueError(f"{name} is {value} (expected 0 or more)")
    return _FORWARDS_PER_STEP * FLOPS_PER_MULTIPLY_ADD * multiply_adds * epochs * dataset_size / 1e18


def accelerator_days(exaflops: float, accelerator: str = "tpu-v3-core", utilization: float = UTILIZATION) -> float:
    """Return the days that one accelerator needs.

    Args:
        exaflops: compute in 1e18 floating-point operations.
        accelerator: "tpu-v3-core", "a100" or "h100" (`published()["accelerators"]`).
        utilization: share of its peak that is reached, in (0, 1].

    Raises:
        ValueError: an unknown accelerator, or a utilization out of range.
    """
    known = published()["accelerators"]
    check_choice("accelerator", accelerator, known)
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization is {utilization} (expected a share above 0, up to 1)")
    return exaflops * 1e18 / (float(known[accelerator]["flops"]) * utilization * _SECONDS_PER_DAY)


def table_rows(number: int) -> list[dict[str, Any]]:
    """Return the rows of Table 2 or 6 of the paper, with our numbers.

    Returns:
        For each row `model`, `dataset`, `epochs`, `source`, the columns of the table, and in exaFLOPs `computed` and
        `computed_without_padding` (see `count_with_padding`). The last two are None for a model that this package does
        not have, or that was trained in another way.
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
    """Count the multiply-adds of an image, with and without those on padding."""
    multiply_adds, on_padding = count_with_padding(config_of_variant(model, num_labels=classes))
    return multiply_adds, multiply_adds - on_padding


def published_runs(metric: str = "ImageNet") -> list[Run]:
    """Return the runs of Figure 5, from Table 6 of the paper, named by model and epochs: "L/16, 14 ep".

    Args:
        metric: a column of the table, such as "ImageNet" or "CIFAR-10".
    """
    return [
        Run(f"{row['model']}, {row['epochs']} ep", _family_of(row["model"]), row["exaFLOPs"], row[metric])
        for row in _printed_rows(6)
    ]


def _family_of(model: str) -> str:
    """Return the family of a name: "R50+B/16" is a hybrid, "R50x1" a ResNet, "B/16" a ViT."""
    return "Hybrid" if "+" in model else "ViT" if "/" in model else "ResNet"


def read_runs(path: str | os.PathLike) -> list[Run]:
    """Read runs from a CSV file with the columns `name`, `exaflops`, `accuracy` (percent) and, optionally, `family`.

    Raises:
        ValueError: there is no run, a column is missing, or a value is not a number above 0.
    """
    runs = []
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        for row in reader:
            try:
                run = Run(
                    row["name"],
                    row.get("family") or _family_of(row["name"]),
                    float(row["exaflops"]),
                    float(row["accuracy"]),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"cannot read {path}, line {reader.line_num}: {error}; {_COLUMNS}") from error
            if not (0 < run.exaflops < math.inf and 0 < run.accuracy < math.inf):
                raise ValueError(f"{path}, line {reader.line_num}: exaflops and accuracy must be above 0")
            runs.append(run)
    if not runs:
        raise ValueError(f"{path} has no runs; {_COLUMNS}")
    return runs
