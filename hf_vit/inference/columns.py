"""Batches of columns, as `datasets.map`, Ray Data, Daft and Spark pass them to a `Predictor`.

A batch is a dictionary, a table or record batch of Arrow, or a DataFrame of pandas. The answer is of the same kind: the
columns of the batch without its images, and those of the predictor.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

NO_IMAGE = {"bytes": b"", "path": None}  # an image that cannot be read


def is_batch(images: Any) -> bool:
    """Return whether images are given as columns; a dictionary of one image has its bytes or its path."""
    if isinstance(images, Mapping):
        return not any(value is None or isinstance(value, str | bytes) for value in images.values())
    return hasattr(images, "columns") and hasattr(images, "shape")  # of Arrow or pandas


def images_of(batch: Any, name: str | None) -> tuple[str, list[Any]]:
    """Return the name of the column of images, and its images.

    Args:
        batch: a batch of columns.
        name: the column; None: `image`, or the only column.

    Raises:
        ValueError: there is no such column.
    """
    found = batch if isinstance(batch, Mapping) else getattr(batch, "column_names", getattr(batch, "columns", ()))
    names = list(map(str, found))
    if name is None:
        name = names[0] if len(names) == 1 else "image"
    if name not in names:
        raise ValueError(f"the batch has no column {name}, only {', '.join(names)}; choose with image_column")
    return name, list_of_values(batch[name])


def list_of_values(column: Any) -> list[Any]:
    """Return the values of a column of Arrow, NumPy, pandas or `datasets` as a list; a missing one is `NO_IMAGE`."""
    values = column.to_pylist() if hasattr(column, "to_pylist") else list(column)
    return [NO_IMAGE if value is None else value for value in values]


def add_columns(batch: Any, images: str, answers: dict[str, Any]) -> Any:
    """Return a batch without its images, and with answers.

    Args:
        batch: a batch of columns.
        images: name of the column of images.
        answers: columns of a predictor.
    """
    if isinstance(batch, Mapping):
        return {name: batch[name] for name in batch if name != images} | answers
    if not hasattr(batch, "column_names"):  # pandas
        return batch.drop(columns=[images]).assign(**{name: list(column) for name, column in answers.items()})
    table = batch.drop_columns([images])
    for name, column in arrow_columns(answers).items():
        table = table.append_column(name, column)
    return table


def arrow_columns(answers: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a predictor as arrays of Arrow; those of an unreadable image are null."""
    import pyarrow as pa

    errors = np.array(answers["error"], object)
    is_missing = errors != ""
    columns: dict[str, Any] = {}
    if "features" in answers:
        features = np.ascontiguousarray(answers["features"], np.float32)
        values = pa.array(features.reshape(-1))
        columns["features"] = pa.FixedSizeListArray.from_arrays(values, features.shape[1], mask=pa.array(is_missing))
    else:
        columns["labels"] = pa.array(answers["labels"], pa.list_(pa.string()), mask=is_missing)
        columns["scores"] = pa.array(answers["scores"], pa.list_(pa.float32()), mask=is_missing)
    columns["error"] = pa.array(errors, pa.string(), mask=~is_missing)
    return columns
