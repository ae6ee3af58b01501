"""Table of the issues of a dataset: `hf-vit audit` writes it, people edit it, `--exclude` and `--relabel` read it."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import datasets

from ..files.messages import did_you_mean, join_names, shorten
from ..files.output import own_file
from ..files.predictions import Table
from ..files.reading import read_csv
from ..settings.fields import DataSettings
from .sources import names_of_splits, open_source

if TYPE_CHECKING:
    from .splits import Split

_ROW = re.compile(r"(\w+)\[(\d+)\]")


class Issue(NamedTuple):
    """A row of issues.csv.

    Args:
        image: path in the folder of the dataset, or SPLIT[ROW] for an image in a table.
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
    with own_file(path) as file, open(file, "w", newline="", encoding="utf-8") as stream:
        table = Table(stream, Issue._fields)
        table.extend(issue._replace(score=f"{issue.score:.4f}") for issue in issues)


def read_issues(path: str) -> list[dict[str, str]]:
    """Read the rows of an edited issues.csv; of its columns only `image` is required.

    Raises:
        ValueError: the file is not such a table.
    """
    try:
        _, rows = read_csv(Path(path).expanduser())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    for line, row in enumerate(rows, start=2):
        if None in row or (any(row.values()) and not row.get("image")):
            raise ValueError(f"{path}, row {line}, is {shorten(row)} (expected an image, and no field without a name)")
    rows = [row for row in rows if any(row.values())]  # a spreadsheet keeps rows whose cells were cleared
    return [{name: re.sub(r"^'(?=[=@+-])", "", (value or "").strip()) for name, value in row.items()} for row in rows]


def name_images(split: "Split", settings: DataSettings, spec: str) -> list[str]:
    """Return a name for each image: its path in the folder of the dataset, or SPLIT[ROW] for one in a table.

    Args:
        spec: the split in the settings' dataset, such as "train" or "train[:98%]".
    """
    folder = Path(str(settings.dataset)).expanduser().absolute()
    names = [_relative(path, folder) if is_file else "" for path, is_file in split.paths()]
    if all(names):
        return names
    source = open_source(str(settings.dataset), settings.dataset_config, settings.layout)
    spec = source.resolve(spec)
    parts = {part.split("[")[0] for part in spec.split("+")}
    lengths = {part: len(source.load(part)) for part in parts}
    ranges = datasets.ReadInstruction.from_spec(spec).to_absolute(lengths)
    rows = [f"{part.splitname}[{row}]" for part in ranges for row in range(part.from_, part.to)]
    return [name or row for name, row in zip(names, rows, strict=True)]


def _relative(path: str | None, folder: Path) -> str:
    """Return a path inside a folder; "" for one outside of it."""
    return Path(path).relative_to(folder).as_posix() if path and Path(path).is_relative_to(folder) else ""


def clean(split: "Split", settings: DataSettings, spec: str) -> tuple["Split", list[str]]:
    """Relabel and exclude images of a split as the tables of `settings.relabel` and `settings.exclude` say.

    Where both name an image for its label, it is relabeled and kept.

    Returns:
        The split, and the names of its images.

    Raises:
        ValueError: a table cannot be read, or names an image that the dataset lacks, or an unknown class.
    """
    if split.is_sharded:
        raise ValueError("exclude, relabel and audit do not work with images in shards")
    names = name_images(split, settings, spec)
    suggested = _read_labels(settings.relabel) if settings.relabel else {}
    issues = read_issues(settings.exclude) if settings.exclude else []
    excluded = {row["image"] for row in issues if not row.get("suggested") or row["image"] not in suggested}
    _check_known({*suggested, *excluded}, names, settings, spec)
    if suggested:
        split = _relabel(split, names, suggested, str(settings.relabel))
    if excluded:
        kept = [position for position, name in enumerate(names) if name not in excluded]
        split = dataclasses.replace(split, samples=split.samples.select(kept))
        names = [names[position] for position in kept]
    return split, names


def _relabel(split: "Split", names: list[str], suggested: dict[str, str], table: str) -> "Split":
    """Set the labels of some images, by their names, to classes of the data."""
    labels, column = split.class_numbers("relabel is set"), split.label_column
    classes = split.label_names or [str(number) for number in range(split.num_labels)]
    for position, name in enumerate(names):
        if (label := suggested.get(name)) is None:
            continue
        if label not in classes:
            raise ValueError(
                f"{table} gives {name} the label {shorten(label)}, which is not a class of the data "
                f"({join_names(classes, 20)}){did_you_mean(label, classes)}"
            )
        labels[position] = classes.index(label)
    feature = split.samples.features[column]
    samples = split.samples.remove_columns(column).add_column(column, labels, feature=feature)
    return dataclasses.replace(split, samples=samples)


def _read_labels(path: str) -> dict[str, str]:
    """Read the suggested label of each image that has one.

    Raises:
        ValueError: the table has no column of them, or an image has two.
    """
    suggested: dict[str, str] = {}
    for row in read_issues(path):
        label, image = row.get("suggested"), row["image"]
        if label is None or (label and suggested.setdefault(image, label) != label):
            found = f"{suggested[image]} and {label}" if label else "nothing"
            raise ValueError(f"{path} has {found} for {image} (expected a column suggested, with one label or none)")
    return suggested


def _check_known(named: Iterable[str], known: list[str], settings: DataSettings, spec: str) -> None:
    """Raise ValueError for an image that neither this split nor another one of the dataset has."""
    unknown = sorted(set(named).difference(known))
    splits = names_of_splits(str(settings.dataset), settings.dataset_config, settings.layout) if unknown else []
    for name in unknown:
        row = _ROW.fullmatch(name)
        is_row_elsewhere = row is not None and row[1] != spec and row[1] in splits
        if not is_row_elsewhere and not (Path(str(settings.dataset)).expanduser() / name).is_file():
            raise ValueError(
                f"exclude or relabel names the image {shorten(name)}, which {settings.dataset} does not have"
                f"{did_you_mean(name, known)}"
            )
