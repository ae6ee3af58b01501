"""Tables with the labels of a folder's images: labels.csv, and `datasets`' metadata.csv, .jsonl or .parquet.

A labels.csv has several labels per image: classes separated by ";" in the column `labels`, or a column of 0 and 1 for
each class; it names every image of its folders. A metadata table names images in the column `file_name`, and its column
of labels is found by `columns.find_label_column`. Both may have a column `split`; without it, `layout` decides.
"""

import csv
import hashlib
import json
import os
import re
from collections.abc import Collection
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from ..files.messages import join_names
from ..files.reading import read_csv, read_text
from .columns import named_like_labels
from .layout import arrange_images, split_key

# Name of a table -> its column of paths, which are relative to the table
TABLES = {
    "labels.csv": "image",
    "metadata.csv": "file_name",
    "metadata.jsonl": "file_name",
    "metadata.parquet": "file_name",
}
_WHOLE_NUMBER = re.compile(r"-?(0|[1-9]\d*)")
_KINDS_OF_VALUES = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_string,
    pa.types.is_list,
    pa.types.is_boolean,
)
_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf(inity)?|nan)", re.IGNORECASE)
_FRACTION = re.compile(r"[+-]?\d*\.\d*[1-9]\d*(e[+-]?\d+)?|[+-]?\d+(\.\d*)?e-\d+", re.IGNORECASE)
_NO_ROW = "not used, images without a row in a table"
_NO_IMAGE = "not used, rows of tables without an image"
_OTHER_TABLES = "not used, tables beside labels.csv"
Loaded = tuple[dict[str, datasets.Dataset], dict[str, list[str]], dict[str, list[str]]]


def has_labels(folder: Path, tables: list[str], label_column: str | None) -> bool:
    """Return whether one of the tables has a column whose name says that it has labels, or that the user names."""
    for name in tables:
        header = _read_header(folder / name)
        columns = [column for column in header if column not in (TABLES[PurePosixPath(name).name], "split")]
        named = {label_column, *(label_column or "").split(",")}
        if PurePosixPath(name).name == "labels.csv" or named.intersection(columns) or named_like_labels(columns):
            return True
    return False


def _read_header(table: Path) -> list[str]:
    if table.suffix == ".parquet":
        return list(pq.read_schema(table).names)
    if table.suffix == ".csv":
        return next(csv.reader(read_text(table).splitlines()), [])
    rows, _ = _read_rows(table)
    return list(rows[0]) if rows else []


def load_tables(folder: Path, tables: list[str], images: list[str], title: str, layout: str | None) -> Loaded:
    """Load the splits of a folder of images with tables.

    Args:
        tables: paths of the tables, relative to the folder.
        images: paths of all images of the folder.
        title: the folder's name, for messages.
        layout: as in `layout.arrange`.

    Returns:
        For each split the columns image (an undecoded path) and those of the tables, with rows sorted by path; the
        user's folders of each split; and names of what is not used, by reason.

    Raises:
        ValueError: a table has other columns, or names an image twice, or one outside of its folder; or a labels.csv
            lacks an image, or names one that does not exist.
    """
    label_tables = [name for name in tables if PurePosixPath(name).name == "labels.csv"]
    unused: dict[str, list[str]] = {}
    if label_tables:
        rows, features = _read_labels(folder, label_tables, images, title)
        unused[_OTHER_TABLES] = [name for name in tables if name not in label_tables]
    else:
        rows, features, unused[_NO_IMAGE] = _read_metadata(folder, tables, set(images), title)
        unused[_NO_ROW] = sorted(set(images) - rows.keys())
    paths = sorted(rows)
    splits: dict[str, list[str]] = {}
    sources: dict[str, list[str]] = {}
    for path, split in zip(paths, arrange_images(paths, layout), strict=True):
        source = f"{path.rpartition('/')[0]}/".lstrip("/")
        stated = str(rows[path].pop("split", None) or "").strip()
        if stated:
            split = split_key(stated)
            source = "column split"
        splits.setdefault(split, []).append(path)
        sources.setdefault(split, [])
        if source not in sources[split]:
            sources[split].append(source)
    opened = {split: _open_split(folder, names, rows, features) for split, names in splits.items()}
    return opened, sources, {reason: names for reason, names in unused.items() if names}


def _open_split(
    folder: Path, paths: list[str], rows: dict[str, dict[str, Any]], features: datasets.Features
) -> datasets.Dataset:
    """Return the images of a split with their rows; the fingerprint is made of the rows and the files' states."""
    columns: dict[str, list] = {"image": [{"bytes": None, "path": f"{folder}/{path}"} for path in paths]}
    for column in features:
        if column != "image":
            columns[column] = [rows[path].get(column) for path in paths]
    split = datasets.Dataset.from_dict(columns, features=features)
    states = []
    for path in paths:
        status = os.stat(folder / path)
        content = rows[path].get("labels", rows[path])
        states.append((f"{folder}/{path}", content, status.st_size, status.st_mtime_ns))
    split._fingerprint = hashlib.sha256(repr(states).encode()).hexdigest()[:32]
    return split


def _image_path(table: str, image: str) -> str | None:
    """Return the path of an image that a table names, relative to the folder; None: outside of the table's folder."""
    outer = os.path.dirname(table)
    path = os.path.normpath(os.path.join(outer, image))
    is_outside = os.path.isabs(image) or path.startswith("..") or not image
    is_inside = not is_outside and (not outer or path.startswith(f"{outer}/"))
    return path.replace(os.sep, "/") if is_inside else None


def _read_labels(
    folder: Path, tables: list[str], images: list[str], title: str
) -> tuple[dict[str, dict[str, Any]], datasets.Features]:
    """Return the row of each image of labels.csv, with its list of classes, and the columns."""
    rows: dict[str, dict[str, Any]] = {}
    class_names: dict[str, None] = {}  # in the order of the columns
    for table in tables:
        header, lines = read_csv(folder / table)
        classes = _class_columns(header, f"{title}/{table}")
        class_names |= dict.fromkeys(classes)
        for number, line in enumerate(lines, start=2):
            path = _image_path(table, line["image"] or "")
            if path is None or path in rows or not _is_complete(line, classes):
                raise ValueError(
                    f"line {number} of {title}/{table} is {join_names(list(map(str, line.values())))} (expected "
                    f"{len(header)} fields: an image of the folder that is on no other line, and 0 or 1 for each class)"
                )
            if classes:
                labels = [name for name in classes if line[name].strip() == "1"]
            else:
                labels = _divide(line["labels"])
            rows[path] = {"labels": labels, "split": line.get("split")}
    _require_all_images(rows.keys(), images, f"{title}/{tables[0]}")
    names = list(class_names) or sorted({name for row in rows.values() for name in row["labels"]})
    if not names:
        raise ValueError(f"{title}/{tables[0]} has no labels")
    return rows, _features({"labels": datasets.List(datasets.ClassLabel(names=names))})


def _require_all_images(named: Collection[str], images: list[str], table: str) -> None:
    """Raise ValueError unless a labels.csv names all images of its folders, and no others."""
    directories = {os.path.dirname(path) for path in named}
    expected = {image for image in images if os.path.dirname(image) in directories}
    wrong = sorted(expected.symmetric_difference(named))
    if wrong:
        raise ValueError(
            f"{table} lacks images of its folder, or names others that do not exist: {join_names(wrong)} (expected a "
            "line for each image, with empty labels if it has none)"
        )


def _class_columns(header: list[str], table: str) -> list[str]:
    """Return the columns of a labels.csv that are classes; none if it has the column `labels`."""
    classes = [name for name in header if name not in ("image", "split", "labels")]
    has_labels_once = ("labels" in header) != bool(classes) and "label" not in classes
    if "image" not in header or len(set(header)) < len(header) or not has_labels_once:
        raise ValueError(
            f"{table} has the columns {join_names(header) or 'none'} (expected image and labels, or image and a column "
            "for each class; split is optional)"
        )
    return classes


def _is_complete(line: dict[str, Any], classes: list[str]) -> bool:
    """Return whether a line has a value for each column and no more, which is 0 or 1 for a class."""
    if None in line or None in line.values():
        return False
    return all(line[name].strip() in ("0", "1") for name in classes)


def _divide(text: str) -> list[str]:
    """Return the classes of a text that separates them by semicolons."""
    found = (name.strip() for name in text.split(";"))
    return list(dict.fromkeys(filter(None, found)))


def _features(columns: dict[str, Any]) -> datasets.Features:
    return datasets.Features({"image": datasets.Image(decode=False), **columns})


def _read_metadata(
    folder: Path, tables: list[str], images: set[str], title: str
) -> tuple[dict[str, dict[str, Any]], datasets.Features, list[str]]:
    """Return the row of each image of metadata tables, the columns of all tables, and the rows without an image."""
    rows: dict[str, dict[str, Any]] = {}
    missing = []
    columns: dict[str, None] = {}
    are_texts = True
    for table in sorted(tables):
        lines, are_csv = _read_rows(folder / table)
        are_texts = are_texts and are_csv
        first_row = 2 if are_csv else 1
        for number, line in enumerate(lines, first_row):
            image = line.pop("file_name", None)
            if not isinstance(image, str) or None in line:
                raise ValueError(
                    f"row {number} of {title}/{table} has no file_name, or other fields than its header (the columns "
                    f"are {join_names(list(map(str, line))) or 'none'})"
                )
            path = _image_path(table, image)
            if path is None or path in rows:
                raise ValueError(
                    f"row {number} of {title}/{table} names {image} (expected an image of the table's folder that no "
                    "other row names)"
                )
            if path in images:
                rows[path] = line
                columns |= dict.fromkeys(line)
            else:
                missing.append(path)
    typed = {}
    for column in columns:
        if column in ("split", "image"):
            continue
        values, feature = _convert(column, [row.get(column) for row in rows.values()], are_texts)
        if feature is not None:
            typed[column] = feature
            for row, value in zip(rows.values(), values, strict=True):
                row[column] = value
    return rows, _features(typed), sorted(missing)


def _read_rows(table: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of a metadata table, and whether its values are text without types, as in CSV."""
    if table.suffix == ".csv":
        return read_csv(table)[1], True
    if table.suffix == ".parquet":
        return pq.read_table(table).to_pylist(), False
    try:
        return [dict(json.loads(line)) for line in read_text(table).splitlines() if line.strip()], False
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{table} is no JSON Lines file of one object per image: {error}") from None


def _convert(column: str, values: list[Any], are_texts: bool) -> tuple[list[Any], Any]:
    """Return the values of a column with their type, as `datasets` finds it; None: it can have no labels."""
    if column == "labels" and all(isinstance(value, str | None) for value in values):
        lists = [_divide(value or "") for value in values]
        names = sorted(set(chain(*lists)))
        return lists, datasets.List(datasets.ClassLabel(names=names)) if names else None
    if are_texts:
        values = _parse_texts(values)
    try:
        array = pa.array(values)
    except (pa.ArrowException, OverflowError):
        return values, None
    if not any(is_kind(array.type) for is_kind in _KINDS_OF_VALUES):
        return values, None
    return values, datasets.features.features.generate_from_arrow_type(array.type)


def _parse_texts(values: list[Any]) -> list[Any]:
    """Return the numbers of a CSV file's column, if all its fields are whole, or some have fractions; else texts.

    An empty field is None.
    """
    given = [value for value in values if value]
    parse: Any = str
    if all(map(_WHOLE_NUMBER.fullmatch, given)):
        parse = int
    elif all(map(_NUMBER.fullmatch, given)) and any(map(_FRACTION.fullmatch, given)):
        parse = float
    return [parse(value) if value else None for value in values]


def locate_row(image: str) -> str | None:
    """Return "TABLE, line N" for the row of an image in a metadata table; None if there is none."""
    path = Path(os.path.abspath(image))
    for folder in path.parents:
        for name, column in TABLES.items():
            table = folder / name
            if name == "labels.csv" or not table.is_file():
                continue
            rows, are_csv = _read_rows(table)
            for number, row in enumerate(rows, start=2 if are_csv else 1):
                if _image_path("", str(row.get(column))) == path.relative_to(folder).as_posix():
                    return f"{table}, line {number}"
    return None
