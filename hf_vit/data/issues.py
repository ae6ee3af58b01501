"""Table of the issues of a data set: `hf-vit audit` writes it, people edit it, `--exclude` and `--relabel` read it."""

import csv
import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import datasets

from ..files.messages import did_you_mean, join_names, shorten
from ..files.output import new_file
from ..files.predictions import Table
from ..settings.fields import DataSettings
from .sources import load_split, names_of_splits

if TYPE_CHECKING:
    from .splits import Split

_ROWS_AT_ONCE = 1000
_ROW = re.compile(r"(\w+)\[(\d+)\]")


class Issue(NamedTuple):
    """A row of issues.csv.

    Args:
        image: path in the folder of the data set, or SPLIT[ROW] for an image in a table.
        issue: its kind, such as "label_error".
        score: the larger, the clearer; comparable between issues of one kind.
        label: name of its class.
        suggested: name of the class that it probably belongs to.
        other: the image that it repeats.
    """

    image: str
    issue: str
    score: float
    label: str = ""
    suggested: str = ""
    other: str = ""


def write_issues(issues: Iterable[Issue], path: Path) -> None:
    """Write issues as CSV."""
    with new_file(path, overwrite=True) as file, open(file, "w", newline="", encoding="utf-8") as stream:
        table = Table(stream, Issue._fields)
        table.extend(issue._replace(score=f"{issue.score:.4f}") for issue in issues)


def read_issues(path: str) -> list[dict[str, str]]:
    """Read the rows of an edited issues.csv; of its columns only `image` is required.

    Raises:
        ValueError: the file is not such a table.
    """
    try:
        with open(Path(path).expanduser(), newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            rows = list(reader)
    except (OSError, ValueError, csv.Error) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    header = reader.fieldnames or []
    if "image" not in header:
        raise ValueError(f"{path} has the columns {', '.join(header) or 'none'} (expected image)")
    for line, row in enumerate(rows, start=2):
        if None in row or not row["image"]:
            raise ValueError(
                f"{path}, row {line}: {'too many columns' if None in row else 'the column image is empty'}"
            )
    return [{name: re.sub(r"^'(?=[=@+-])", "", (value or "").strip()) for name, value in row.items()} for row in rows]


def name_images(split: "Split", settings: DataSettings, spec: str) -> list[str]:
    """Return a name for each image: its path in the folder of the data set, or SPLIT[ROW] for one in a table.

    Args:
        spec: the split in the settings' data set, such as "train" or "train[:98%]".
    """
    folder = Path(str(settings.dataset)).expanduser().absolute()
    names: list[str] = []
    batches: Any = split.samples.select_columns(split.image_column).with_format("arrow").iter(_ROWS_AT_ONCE)
    for batch in batches:  # the bytes of images in a table are not read
        contents, paths = batch[split.image_column].combine_chunks().flatten()
        for path, is_file in zip(paths.to_pylist(), contents.is_null().to_pylist(), strict=True):
            file = Path(path or "")
            names.append(file.relative_to(folder).as_posix() if is_file and file.is_relative_to(folder) else "")
    if all(names):
        return names
    parts = {part.split("[")[0] for part in spec.split("+")}
    lengths = {part: len(load_split(str(settings.dataset), part, settings.dataset_config)) for part in parts}
    ranges = datasets.ReadInstruction.from_spec(spec).to_absolute(lengths)
    rows = [f"{part.splitname}[{row}]" for part in ranges for row in range(part.from_, part.to)]
    return [name or row for name, row in zip(names, rows, strict=True)]


def clean(split: "Split", settings: DataSettings, spec: str) -> "Split":
    """Relabel and exclude images of a split as the tables of `settings.relabel` and `settings.exclude` say.

    Where both name an image for its label, it is relabeled and kept.

    Raises:
        ValueError: a table cannot be read, names an image that the data set lacks, an unknown class, or all images.
    """
    if split.is_sharded:
        raise ValueError("exclude and relabel do not work with streaming: set streaming to false")
    positions = {name: position for position, name in enumerate(name_images(split, settings, spec))}
    if settings.relabel:
        if split.label_column is None or split.multi_label:
            raise ValueError("relabel needs images with one label each")
        suggested = _read_labels(settings.relabel)
        _check_known(suggested, positions, settings.relabel, settings, spec)
        classes = split.label_names or [str(number) for number in range(split.num_labels)]
        labels, feature = split.class_numbers(), split.samples.features[split.label_column]
        for image, name in suggested.items():
            if image not in positions:  # of another split
                continue
            if name not in classes:
                raise ValueError(
                    f"{settings.relabel} gives {image} the label {shorten(name)}, which is not a class of the data "
                    f"({join_names(classes, 20)}){did_you_mean(name, classes)}"
                )
            labels[positions[image]] = classes.index(name)
        samples = split.samples.remove_columns(split.label_column)
        samples = samples.add_column(split.label_column, labels, feature=feature)
        split = dataclasses.replace(split, samples=samples)
    if settings.exclude:
        excluded = excluded_images(settings)
        _check_known(excluded, positions, settings.exclude, settings, spec)
        kept = [position for name, position in positions.items() if name not in excluded]
        if not kept:
            raise ValueError(f"{settings.exclude} excludes all {len(split)} images of {spec}")
        split = dataclasses.replace(split, samples=split.samples.select(kept))
    return split


def excluded_images(settings: DataSettings) -> set[str]:
    """Return the images that `settings.exclude` names, except those that `settings.relabel` relabels."""
    rows = read_issues(settings.exclude) if settings.exclude else []
    relabeled = _read_labels(settings.relabel) if settings.relabel else {}
    return {row["image"] for row in rows if not (row.get("suggested") and row["image"] in relabeled)}


def _read_labels(path: str) -> dict[str, str]:
    """Read the suggested label of each image that has one.

    Raises:
        ValueError: the table has no column of them, or an image has two.
    """
    suggested: dict[str, str] = {}
    rows = read_issues(path)
    if rows and "suggested" not in rows[0]:
        raise ValueError(f"{path} has no column suggested (expected the labels to set)")
    for row in rows:
        label = row.get("suggested", "")
        if label and suggested.setdefault(row["image"], label) != label:
            raise ValueError(f"{path} has two labels for {row['image']}: {suggested[row['image']]} and {label}")
    return suggested


def _check_known(named: Iterable[str], known: dict[str, int], path: str, settings: DataSettings, spec: str) -> None:
    """Raise ValueError for an image that neither this split nor another one of the data set has."""
    for name in (name for name in named if name not in known):
        if row := _ROW.fullmatch(name):
            exists = row[1] != spec and row[1] in names_of_splits(str(settings.dataset), settings.dataset_config)
        else:
            exists = (Path(str(settings.dataset)).expanduser() / name).is_file()
        if not exists:
            raise ValueError(
                f"{path} names the image {shorten(name)}, which {settings.dataset} does not have"
                f"{did_you_mean(name, known)}"
            )
