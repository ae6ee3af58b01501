"""Folders of images whose labels are in a table: labels.csv, or a metadata.csv of `datasets` with several labels."""

import csv
import hashlib
import os
from pathlib import Path

import datasets

from ..files.messages import join_names
from ..files.reading import read_text
from .folders import EXTENSIONS, find_splits

TABLES = {"labels.csv": "image", "metadata.csv": "file_name"}  # file -> its column of paths


def find_table(folder: Path) -> Path | None:
    """Return the table of labels at the top of a folder, if there is one."""
    if (table := folder / "labels.csv").is_file():
        return table
    if not (table := folder / "metadata.csv").is_file():
        return None
    header = next(csv.reader(read_text(table).splitlines()), [])
    return table if {"file_name", "labels"} <= set(header) else None  # `datasets` reads those with one label per image


def load_table(table: Path) -> dict[str, datasets.Dataset]:
    """Load the splits of a folder of images with a table of labels.

    The columns are the path of an image, relative to the folder, and either `labels` (class names separated by ";") or
    one column of 0 and 1 per class. A column `split` is optional; without it, images in `train/`, `val/` or `test/` are
    of that split, and all others of `train`.

    Returns:
        For each split the columns image (an undecoded path) and labels (a list of classes).

    Raises:
        ValueError: the table has other columns, or names an image twice, an image that is not in the folder, or no
            class, or lacks an image in the directory of another one.
    """
    folder, image_column = os.path.abspath(table.parent), TABLES[table.name]
    lines = csv.DictReader(read_text(table).splitlines())
    header = list(lines.fieldnames or [])
    classes = [name for name in header if name not in (image_column, "split", "labels")]
    if image_column not in header or len(set(header)) < len(header) or ("labels" in header) == bool(classes):
        raise ValueError(
            f"{table} has the columns {join_names(header) or 'none'} (expected {image_column} and labels, or "
            f"{image_column} and a column for each class; split is optional)"
        )
    rows: dict[str, tuple[str, list[str]]] = {}  # path -> split and names of its labels
    for number, row in enumerate(lines, start=2):
        where = f"line {number} of {table}"
        if None in row or None in row.values():
            raise ValueError(f"{where} does not have {len(header)} fields")
        path = os.path.normpath(os.path.join(folder, row[image_column]))
        if not path.startswith(folder + os.sep) or path in rows:
            reason = "a second time" if path in rows else "which is not in the folder"
            raise ValueError(f"{where} names {row[image_column]!r}, {reason}")
        marks = {name: row[name].strip() for name in classes}
        if wrong := [name for name, mark in marks.items() if mark not in ("0", "1")]:
            raise ValueError(f"{where} has {row[wrong[0]]!r} in the column {wrong[0]} (expected 0 or 1)")
        labels = row["labels"].split(";") if not classes else [name for name, mark in marks.items() if mark == "1"]
        first, _, rest = row[image_column].partition("/")
        found = [row["split"].strip()] if "split" in row else find_splits(first) if rest else []
        split = found[0] if len(found) == 1 else "train"
        rows[path] = split, list(dict.fromkeys(filter(None, map(str.strip, labels))))
    if missing := [path for path in rows if not os.path.isfile(path)]:
        raise ValueError(f"{len(missing)} of {len(rows)} images of {table} do not exist: {join_names(missing)}")
    files = (Path(entry.path) for directory in set(map(os.path.dirname, rows)) for entry in os.scandir(directory))
    images = (str(file) for file in files if file.suffix.lower() in EXTENSIONS and not file.name.startswith("."))
    if unlisted := sorted(set(images) - rows.keys()):
        raise ValueError(
            f"{len(unlisted)} images of {table.parent} are not in {table.name}: {join_names(unlisted)}; add a line for "
            "each, with empty labels if it has none"
        )
    names = classes or sorted({name for _, labels in rows.values() for name in labels})
    if not names:
        raise ValueError(f"{table} has no labels")
    kind = datasets.List(datasets.ClassLabel(names=names))
    features = datasets.Features({"image": datasets.Image(decode=False), "labels": kind})
    splits = {}
    for split in dict.fromkeys(split for split, _ in rows.values()):
        chosen = sorted((path, labels) for path, (its_split, labels) in rows.items() if its_split == split)
        columns = {
            "image": [{"bytes": None, "path": path} for path, _ in chosen],
            "labels": [[names.index(label) for label in labels] for _, labels in chosen],
        }
        splits[split] = datasets.Dataset.from_dict(columns, features=features)
        states = [(path, labels, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path, labels in chosen]
        splits[split]._fingerprint = hashlib.sha256(repr(states).encode()).hexdigest()[:32]
    return splits
