"""The images that a model was trained on, and those that its training held out, as card_data.json beside it says."""

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from ..data.fingerprint import fingerprint_data, image_digests
from ..data.splits import Split, divide, open_named, rows_of_folds, rows_to_hold_out
from ..files.reading import read_json_object
from ..loading import find_model
from ..settings.fields import AUTO, FinetuneSettings

_FOLD = re.compile(r"fold (\d+) of (\d+)")  # `eval_split` of a model of cross-validation


def read_record(model: str) -> dict[str, Any] | None:
    """Return the content of the card_data.json beside a model; None without one."""
    file = find_model(model).find_report("card_data.json")
    return None if file is None else read_json_object(file)


def is_divided(record: Mapping[str, Any]) -> bool:
    """Return whether a run held out a part of its training split."""
    name = str(record.get("eval_split"))
    return name == AUTO or _FOLD.fullmatch(name) is not None


def divide_as_recorded(split: Split, record: Mapping[str, Any]) -> tuple[Split, Split | None]:
    """Divide a training split as a run did: the images that it trained on, and those that it held out of them."""
    held_out = rows_held_out(split, record)
    return (split, None) if held_out is None else divide(split, held_out)


def rows_held_out(split: Split, record: Mapping[str, Any]) -> np.ndarray | None:
    """Return the rows of a training split that a run held out; None if it held out none of them."""
    name = str(record.get("eval_split"))
    if name == AUTO:
        return rows_to_hold_out(split, record.get("settings", {}).get("eval_fraction", 0.1))
    if fold := _FOLD.fullmatch(name):
        return rows_of_folds(split, int(fold[2]))[int(fold[1]) - 1]
    return None


def training_digests(model: str) -> set[bytes]:
    """Return the SHA-256 of each image that a model was trained on, and the models that it was trained from.

    Raises:
        ValueError: these images are not known, or have changed since.
    """
    record = read_record(model)
    if record is None:
        raise ValueError(f"{model} has no card_data.json, which says what it was trained on")
    stated = record.get("settings") or {}
    if stated.get("add") or stated.get("remove"):
        raise ValueError(f"classes of {model} were added or removed, and its record lacks the earlier images")
    names = ["task", *(one.name for one in fields(FinetuneSettings) if one.metadata["group"] == "data")]
    settings = FinetuneSettings(**{name: stated[name] for name in names if name in stated})
    split, _ = divide_as_recorded(open_named(settings, settings.train_split), record)
    if split.is_sharded or fingerprint_data(split) != record.get("fingerprint"):
        raise ValueError(f"the images that {model} was trained on are in shards, or {settings.dataset} has changed")
    base = str(record.get("base_model"))
    earlier = training_digests(base) if Path(base, "card_data.json").is_file() else set()
    return earlier.union(image_digests(split))
