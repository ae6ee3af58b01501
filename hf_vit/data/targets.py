"""Targets of a regression: the columns that have them, and their values, each a finite number."""

import math
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np

from ..files.messages import join_names, shorten
from ..settings.fields import AUTO
from .columns import find_column, has_classes, named_like_labels
from .tables import locate_row

_TYPES = ("int", "float", "double", "decimal", "bool", "string")  # beginnings of what may hold numbers


def find_target_columns(samples: datasets.Dataset, label_column: str | None, task: str) -> list[str]:
    """Return the columns with the targets of a regression; none for a classification.

    Args:
        label_column: names, separated by commas; None: the column with a name of `LABEL_NAMES`, else the only column of
            floating-point numbers.
        task: as in the settings; "auto" is a regression if a number of a floating-point column has a fraction.

    Raises:
        ValueError: there is no such column, or not exactly one, or it has no numbers.
    """
    features = samples.features
    if task not in (AUTO, "regression"):
        return []
    columns = _named_columns(features, label_column)
    if label_column is None and not columns and (task == "regression" or not has_classes(features)):
        columns = [name for name in features if _is_float(features[name])]
    if task == AUTO:
        is_clear = len(columns) == 1 or label_column is not None
        if not is_clear or not columns or not all(_has_fractions(samples, name) for name in columns):
            return []
    if label_column is None and len(columns) != 1:
        raise ValueError(
            f"there are {len(columns)} columns that may have the targets ({join_names(columns) or 'none'}): name them "
            f"with --label-column; the columns are {', '.join(features)}"
        )
    for name in columns:
        feature = features[find_column(features, name, _is_float, "label")]
        if not isinstance(feature, datasets.Value) or not feature.dtype.startswith(_TYPES):
            raise ValueError(f"the column {name} has no numbers, which a regression needs")
    return columns


def _named_columns(features: datasets.Features, label_column: str | None) -> list[str]:
    """Return the columns that the user names, or those whose names say that they have labels."""
    if label_column is None:
        return named_like_labels(features)
    return [label_column] if label_column in features else split_columns(label_column)


def split_columns(label_column: str, count: int | None = None) -> list[str]:
    """Return the names of columns that are separated by commas.

    Raises:
        ValueError: their number is not `count`.
    """
    columns = [name.strip() for name in label_column.split(",")]
    if count not in (None, len(columns)):
        raise ValueError(f"label_column is {label_column}, but the model has {count} targets")
    return columns


def _is_float(feature: Any) -> bool:
    return isinstance(feature, datasets.Value) and feature.dtype.startswith(("float", "double"))


def _has_fractions(samples: datasets.Dataset, column: str) -> bool:
    """Return whether a column exists, is of floating-point numbers, and has one that is not whole."""
    if column not in samples.features or not _is_float(samples.features[column]):
        return False
    values = samples.data.column(column).drop_null().to_numpy()
    return bool((np.isfinite(values) & (values != np.floor(values))).any())


def read_targets(samples: datasets.Dataset, columns: Sequence[str], image_column: str) -> np.ndarray:
    """Return the targets of all images, (images, targets) float64.

    Raises:
        ValueError: a value is missing, is no number, or is infinite; the message names its table, line and column.
    """
    found = np.empty((len(samples), len(columns)))
    table = samples.select_columns(list(columns)).with_format("arrow")[:]
    for position, column in enumerate(columns):
        for row, value in enumerate(table[column].to_pylist()):
            number = _as_number(value)
            if not math.isfinite(number):
                image = (samples[row][image_column] or {}).get("path")
                where = (image and locate_row(image)) or f"row {row}"
                raise ValueError(
                    f"{where}, column {column}: {'no value' if value is None else shorten(value)} (expected a finite "
                    "number; give every image one, or leave the image out with --exclude)"
                )
            found[row, position] = number
    return found


def _as_number(value: Any) -> float:
    """Convert a value to a number; NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
