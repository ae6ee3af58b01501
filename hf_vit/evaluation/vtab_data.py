"""Data of a VTAB-1k task: 800 training examples, 200 validation examples, and the test split.

They are read from the Hub, or from a folder per task, which contains either

* the usual lists of VTAB-1k with the official examples: `train800.txt`, `val200.txt` and `test.txt`, whose lines are a
  path and a class index; or
* the dataset in any form that `sources.load_split` reads, from which 800 and 200 examples are drawn with a fixed seed.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import yaml

from ..data.labels import require_labels
from ..data.sources import load_split, slice_split
from ..data.splits import Split, open_split

TRAIN, VALIDATION = 800, 200  # examples of a task
_SEED = 0  # of the draw
_LISTS = {"train": "train800.txt", "validation": "val200.txt", "test": "test.txt"}
# Of google-research/task_adaptation, data/{clevr,dsprites,kitti,smallnorb}.py
_CLEVR_DISTANCES = (8.0, 8.5, 9.0, 9.5, 10.0)  # units of the rendered scene, between 6 classes
_KITTI_DISTANCES = (8.0, 20.0, 999.0)  # meters, between 4 classes; the last is "no vehicle"
_KITTI_VEHICLES = ("Car", "Van", "Truck", 0, 1, 2)  # names of the annotation, or numbers of TensorFlow Datasets
_NO_VEHICLE = 1000.0


@dataclass
class Task:
    """Row of vtab.yaml."""

    name: str
    group: str
    classes: int
    folder: str
    hub: str
    augmentation: str
    hub_columns: dict[str, str] = field(default_factory=dict)
    splits: dict[str, str] = field(default_factory=dict)
    label: str | None = None
    target: str | None = None


@dataclass
class TaskData:
    """Splits of a task."""

    train: Split
    validation: Split
    test: Split
    listed: bool  # official examples, not a random draw


def read_table() -> dict[str, Any]:
    """Read vtab.yaml.

    Returns:
        "tasks"; "setting", their common settings; "augmentation", the settings of each level; and "paper", the
        accuracies from 0 to 1 by model and task.
    """
    table = yaml.safe_load((files("hf_vit.evaluation") / "vtab.yaml").read_text(encoding="utf-8"))
    tasks = [Task(**row) for row in table["tasks"]]
    names = [task.name for task in tasks]
    shares = {model: [value / 100 for value in row] for model, row in table["paper"].items()}
    paper = {model: dict(zip(names, row, strict=True)) for model, row in shares.items()}
    return {**table, "tasks": tasks, "paper": paper}


def open_task(task: Task, source: str) -> TaskData:
    """Open the data of a task.

    Args:
        task: a row of the table.
        source: "hub", or the folder with the folders of the tasks.

    Raises:
        ValueError: the data are missing, too few, or have unknown labels; the message names the task.
    """
    try:
        folder = Path(source).expanduser() / task.folder
        listed = source != "hub" and (folder / _LISTS["test"]).exists()
        data = _read_lists(task, folder) if listed else _draw_examples(task, source, folder)
        for name in _LISTS:  # before any training
            require_labels(getattr(data, name), name)
    except (ValueError, OSError) as error:
        raise ValueError(f"{task.name}: {error}") from error
    return data


def _read_lists(task: Task, folder: Path) -> TaskData:
    """Read the examples of VTAB-1k's lists."""
    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.Value("int64")})
    splits = {}
    for name, file in _LISTS.items():
        text = (folder / file).read_text(encoding="utf-8")
        lines = [line.rsplit(maxsplit=1) for line in text.splitlines() if line.strip()]
        if wrong := [line for line in lines if len(line) != 2 or not line[1].isdigit()]:
            raise ValueError(f"{folder / file} has the line {wrong[0]} (expected a path and a class index)")
        columns = {"image": [str(folder / path) for path, _ in lines], "label": [int(number) for _, number in lines]}
        samples = datasets.Dataset.from_dict(columns, features=features)
        splits[name] = Split(samples, "image", "label", None, task.classes)
    return TaskData(**splits, listed=True)


def _draw_examples(task: Task, source: str, folder: Path) -> TaskData:
    """Draw 800 and 200 different examples of the splits that the table names."""
    specs = {"train": "train", "validation": "train", "test": "test"}
    specs |= task.splits if source != "hub" else {}
    name = task.hub if source == "hub" else str(folder)
    pools = {split: _load_shuffled(task, name, spec) for split, spec in specs.items()}
    start = TRAIN if specs["validation"] == specs["train"] else 0
    train = _take(pools["train"], 0, TRAIN, specs["train"])
    return TaskData(train, _take(pools["validation"], start, VALIDATION, specs["validation"]), pools["test"], False)


def _load_shuffled(task: Task, name: str, spec: str) -> Split:
    """Shuffle a split with a fixed seed, and take the slice that `spec` may name.

    Labels are computed from the column of the task's target, if it is there, or else are in a label column.
    """
    base = spec.partition("[")[0]
    samples = cast(datasets.Dataset, load_split(name, base))  # it is not streamed
    present = {theirs: ours for theirs, ours in task.hub_columns.items() if theirs in samples.column_names}
    samples = samples.rename_columns(present) if present else samples
    label_column = task.label if task.label in samples.features else None
    column, label_of = TARGETS.get(str(task.target), ("", int))
    if column in samples.features:
        rows: Any = samples.select_columns([column])
        label_column = "computed label"
        labels = [label_of(row[column]) for row in rows]
        samples = samples.add_column(label_column, labels)  # pyright: ignore[reportCallIssue]
    split = open_split(samples, label_column=label_column)
    shuffled = split.samples.select(np.random.default_rng(_SEED).permutation(len(split)))
    return replace(split, samples=slice_split({base: shuffled}, spec), label_names=None, num_labels=task.classes)


def _take(split: Split, start: int, count: int, spec: str) -> Split:
    if start + count > len(split):
        raise ValueError(f"{spec} has {len(split)} examples (expected at least {start + count})")
    return replace(split, samples=split.samples.select(range(start, start + count)))


def join(train: Split, validation: Split) -> Split:
    """Join the training and validation examples, the 1,000 for the final model."""
    return replace(train, samples=datasets.concatenate_datasets([train.samples, validation.samples]))


def _records(objects: Any) -> list[dict[str, Any]]:
    """Convert annotated objects to a list of records."""
    if isinstance(objects, dict):
        return [dict(zip(objects, values, strict=True)) for values in zip(*objects.values(), strict=True)]
    return list(objects)


def clevr_distance(objects: Any) -> int:
    """Distance of the closest object from the camera (the third of `pixel_coords`), as classes 0 to 5."""
    return bisect_left(_CLEVR_DISTANCES, min(entry["pixel_coords"][2] for entry in _records(objects)))


def kitti_distance(objects: Any) -> int:
    """Distance of the closest car, van or truck (the third of `location`): up to 8 m, 20 m, further, or none."""
    vehicles = [entry["location"][2] for entry in _records(objects) if entry["type"] in _KITTI_VEHICLES]
    return bisect_left(_KITTI_DISTANCES, min([*vehicles, _NO_VEHICLE]))


# Column of annotations, and the label computed from one; `objects` is a list of records, or a record of lists
TARGETS: dict[str, tuple[str, Callable[[Any], int]]] = {
    "clevr_count": ("objects", lambda objects: len(_records(objects)) - 3),  # 3 to 10 objects
    "clevr_distance": ("objects", clevr_distance),
    "kitti_distance": ("objects", kitti_distance),
    # 32 horizontal positions in 16 classes of two; 40 orientations in 16 of 2.5, that is three and two in turn
    "dsprites_location": ("label_x_position", lambda position: position // 2),
    "dsprites_orientation": ("label_orientation", lambda orientation: int(orientation // 2.5)),
    # The info files have 18 azimuths 0, 2, 4 to 34, in units of 10 degrees, and elevations 0 to 8, of 30 to 70 degrees
    "smallnorb_azimuth": ("azimuth", lambda azimuth: azimuth // 2),
    "smallnorb_elevation": ("elevation", lambda elevation: elevation),
}
