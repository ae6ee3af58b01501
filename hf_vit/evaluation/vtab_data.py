"""Data of a VTAB-1k task: 800 training examples, 200 validation examples, and the test split.

They are read from the Hub, or from a folder per task, which contains either

* the usual lists of VTAB-1k with the official examples: `train800.txt`, `val200.txt` and `test.txt`, whose lines are a
  path and a class number; or
* the data set in any form that `sources.load_split` reads, from which 800 and 200 examples are drawn with a fixed seed.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

import datasets
import numpy as np
import yaml

from ..data.sources import find_column, find_label_column, is_image, load_split, slice_split
from ..data.splits import Split

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


@dataclass
class _TargetSplit(Split):
    """Split whose labels are computed from a column by a function of `TARGETS`, if it has one."""

    target: str | None = None  # a name, as data workers get no functions

    def label(self, sample: dict) -> int:
        """Return the class number of a row."""
        value = sample[self.label_column]
        return int(value) if self.target is None else TARGETS[self.target].function(value)

    def class_numbers(self, purpose: str = "the command") -> np.ndarray:
        """Return the class number of each image, (images,)."""
        return np.array([self.label(row) for row in self.samples.select_columns([self.label_column])])


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
        for split in (data.train, data.validation, data.test):  # before any training
            for number, label in enumerate(split.class_numbers()):
                if not 0 <= label < task.classes:
                    raise ValueError(f"example {number} has the label {label}, but there are {task.classes} classes")
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
            raise ValueError(
                f"{folder / file} has the line {' '.join(wrong[0])!r} (expected a path and a class number)"
            )
        columns = {"image": [str(folder / path) for path, _ in lines], "label": [int(number) for _, number in lines]}
        samples = datasets.Dataset.from_dict(columns, features=features)
        splits[name] = _TargetSplit(samples, "image", "label", None, task.classes)
    return TaskData(**splits, listed=True)


def _draw_examples(task: Task, source: str, folder: Path) -> TaskData:
    """Draw 800 and 200 different examples of the splits that the table names."""
    specs = {"train": "train", "validation": "train", "test": "test"}
    specs |= task.splits if source != "hub" else {}
    name = task.hub if source == "hub" else str(folder)
    pools = {split: _describe(task, _load_shuffled(name, spec)) for split, spec in specs.items()}
    start = TRAIN if specs["validation"] == specs["train"] else 0
    train = _take(pools["train"], 0, TRAIN, specs["train"])
    return TaskData(train, _take(pools["validation"], start, VALIDATION, specs["validation"]), pools["test"], False)


def _load_shuffled(name: str, spec: str) -> datasets.Dataset:
    """Shuffle a split with a fixed seed, and take the slice that `spec` may name."""
    base = spec.partition("[")[0]
    whole = cast(datasets.Dataset, load_split(name, base))  # it is not streamed
    shuffled = whole.select(np.random.default_rng(_SEED).permutation(len(whole)))
    return slice_split({base: shuffled}, spec)


def _describe(task: Task, samples: datasets.Dataset) -> Split:
    """Find the columns of images and labels; labels are in the column of the task's target, else in a label column."""
    present = {theirs: ours for theirs, ours in task.hub_columns.items() if theirs in samples.column_names}
    samples = samples.rename_columns(present) if present else samples
    image_column = find_column(samples.features, None, is_image, "image", "--dataset FOLDER, whose data has only one")
    samples = samples.cast_column(image_column, datasets.Image(decode=False))
    if task.target is not None and (column := TARGETS[task.target].column) in samples.features:
        return _TargetSplit(samples, image_column, column, None, task.classes, target=task.target)
    named = task.label if task.label in samples.features else None
    return _TargetSplit(samples, image_column, find_label_column(samples.features, named), None, task.classes)


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


class _Target(NamedTuple):
    column: str  # of annotation
    function: Callable[[Any], int]


# Labels that are computed from the annotation of an image; `objects` is a list of records, or a record of lists
TARGETS = {
    "clevr_count": _Target("objects", lambda objects: len(_records(objects)) - 3),  # 3 to 10 objects
    "clevr_distance": _Target("objects", clevr_distance),
    "kitti_distance": _Target("objects", kitti_distance),
    # 32 horizontal positions in 16 classes of two; 40 orientations in 16 of 2.5, that is three and two in turn
    "dsprites_location": _Target("label_x_position", lambda position: position // 2),
    "dsprites_orientation": _Target("label_orientation", lambda orientation: int(orientation // 2.5)),
    # The info files have 18 azimuths 0, 2, 4 to 34, in units of 10 degrees, and elevations 0 to 8, of 30 to 70 degrees
    "smallnorb_azimuth": _Target("azimuth", lambda azimuth: azimuth // 2),
    "smallnorb_elevation": _Target("elevation", lambda elevation: elevation),
}
