"""Find a checkpoint: in released.yaml, or in AugReg's index of 51,509 fine-tuned files."""

import csv
import math
import os
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from ..files.download import fetch
from ..files.messages import shorten
from ..files.reading import read_text
from .augreg import ADAPTED_TO, AUGREG, AUGREG_MODELS, INDEX, parse_augreg
from .released import Released, families, released, released_facts, variants

COLUMNS = ("name", "ds", "final_val", "adapt_ds", "adapt_resolution", "adapt_final_val", "adapt_final_test",
           "filename", "adapt_filename")  # fmt: skip
_FILE = re.compile(r"[\w.+-]*")  # a name in the index, without folders; of a model that was only pre-trained empty
_PLACE = "(place)"  # where rows keep the file and line that they are from


class Found(NamedTuple):
    """An answer of `search`: a file, and what is known of it in words."""

    location: str
    about: str


def search(
    variant: str,
    adapted_to: str | None = None,
    resolution: int | None = None,
    index: str | os.PathLike | None = None,
    limit: int = 10,
) -> list[Found]:
    """Find checkpoints of an architecture, the best on validation images first where an index is given.

    Args:
        variant: such as "B/16" or "R50+L/32".
        adapted_to: a data set of fine-tuning, as file names call it: "imagenet2012", "cifar100", "kitti",
            "oxford_iiit_pet" or "resisc45"; None for all, and with an index for models that were only pre-trained.
        resolution: of fine-tuning, in pixels.
        index: the index.csv of AugReg's 51,509 fine-tuned files: a path or an address. Without it, the built-in list
            of recommended files and of the other buckets is searched.

    Raises:
        ValueError: an unknown architecture or data set, or an index without the columns.
    """
    if variant not in variants():
        raise ValueError(f"unknown architecture {variant!r}; known: {', '.join(variants())}")
    if adapted_to is not None and adapted_to not in ADAPTED_TO:
        raise ValueError(f"no file was adapted to {adapted_to!r}; data sets: {', '.join(ADAPTED_TO)}")
    if index is None:
        found = [entry for entry in released() if _fits(entry, variant, adapted_to, resolution)]
        by_pattern = [
            *(found for family, facts in released_facts()["patterns"].items() if variant in facts["variants"]
              for found in files_of(family))
        ] if adapted_to is None and resolution is None else []  # fmt: skip
        return [*(Found(entry.location, entry.facts["title"]) for entry in found), *by_pattern][:limit]
    rows = (row for row in _read_index(index) if row["name"] == variant)
    if adapted_to is None and resolution is None:
        best = sorted({(_number(row, "final_val"), row["filename"], row["ds"]) for row in rows}, reverse=True)
        return [Found(f"{AUGREG}/{file}.npz", f"pre-trained on {ds}: {value:.4f}") for value, file, ds in best[:limit]]
    chosen = [
        row for row in rows
        if adapted_to in (None, row["adapt_ds"]) and resolution in (None, int(_number(row, "adapt_resolution")))
    ]  # fmt: skip
    chosen.sort(key=lambda row: _number(row, "adapt_final_val"), reverse=True)
    return [
        Found(
            f"{AUGREG}/{row['adapt_filename']}.npz",
            f"{row['adapt_ds']}: validation {_number(row, 'adapt_final_val'):.4f}, "
            f"test {_number(row, 'adapt_final_test'):.4f}",
        )
        for row in chosen[:limit]
    ]


def files_of(family: str) -> list[Found]:
    """Every file of a family of released.yaml; of a family of very many files how they are named.

    Raises:
        ValueError: no family has this name.
    """
    if family in released_facts()["patterns"]:
        facts = released_facts()["patterns"][family]
        return [Found(f"{facts['location']}/{facts['file']}.npz", facts["title"])]
    found = [Found(entry.location, entry.facts["title"]) for entry in released() if entry.family == family]
    if not found:
        raise ValueError(f"no family is called {family!r}; known: {', '.join(families())}")
    return found


def _fits(entry: Released, variant: str, adapted_to: str | None, resolution: int | None) -> bool:
    data = ADAPTED_TO.get(adapted_to or "")
    return (
        entry.variant.removesuffix("-gap-norep") == variant.removesuffix("-gap-norep")
        and (data is None or (entry.facts["datasets"][-1] == data and len(entry.facts["datasets"]) > 1))
        and resolution in (None, entry.facts.get("resolution"))
    )


def _read_index(index: str | os.PathLike) -> Iterator[dict[str, str]]:
    """The rows of AugReg's index.csv: a path, or an address that is downloaded once.

    Raises:
        ValueError: it lacks a column, or has a row that is none; the message names the line.
    """
    path = Path(index)
    if "://" in str(index):
        path = fetch(str(index)).path
    reader = csv.DictReader(StringIO(read_text(path), newline=""), strict=True)
    try:
        if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
            raise ValueError(f"{index} is not the index of AugReg; it lacks {', '.join(missing)}")
        for row in reader:
            place = f"{index}, line {reader.line_num}"
            if None in row or None in row.values():
                raise ValueError(f"{place}: there are more or fewer values than columns")
            if odd := [row[column] for column in ("filename", "adapt_filename") if not _FILE.fullmatch(row[column])]:
                raise ValueError(f"{place}: {shorten(odd[0])} is not the name of a file")
            yield {**row, _PLACE: place}
    except csv.Error as error:
        raise ValueError(f"{index} cannot be read: {error}") from None


def _number(row: dict[str, str], column: str) -> float:
    """A number of a row.

    Raises:
        ValueError: it is none, or not finite; the message names the line.
    """
    try:
        number = float(row[column])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{row[_PLACE]}: {column} is {shorten(row[column])}; it must be a number")
    return number


def best_augreg(variant: str, index: str | os.PathLike | None = None) -> str:
    """The pre-trained AugReg file that the original code chooses for an architecture.

    It is the one with the highest `final_val` among those pre-trained on ImageNet-21k for 300 epochs
    (google-research/vision_transformer, vit_jax/train.py); nine are recommended in its README and need no index.

    Args:
        variant: "B/16" or "B_16".
        index: AugReg's index.csv, a path or an address; the built-in list by default, and the published index where
            that does not have the architecture.
    """
    variant = AUGREG_MODELS.get(variant, variant)
    if variant not in AUGREG_MODELS.values():
        raise ValueError(f"AugReg has no {variant!r}; it has {', '.join(AUGREG_MODELS.values())}")
    if index is None:
        for entry in released():
            if entry.family == "augreg" and entry.variant == variant and "--" not in entry.name:
                return entry.name
    rows = [row for row in _read_index(index or INDEX) if row["name"] == variant and row["ds"] == "i21k"]
    if not rows:
        raise ValueError(f"{index or INDEX} has no {variant} that was pre-trained on i21k")
    return max(rows, key=lambda row: _number(row, "final_val"))["filename"]


def address_of(source: str, index: str | os.PathLike | None = None) -> str:
    """`augreg:best:B/16` or `augreg:NAME` as an address; anything else as it is."""
    if not source.startswith("augreg:"):
        return source
    name = source.removeprefix("augreg:")
    if name.startswith("best:"):
        name = best_augreg(name.removeprefix("best:"), index)
    elif parse_augreg(name.removesuffix(".npz")) is None:
        raise ValueError(f"{name!r} is not the name of an AugReg file; `augreg:best:B/16` chooses one")
    return f"{AUGREG}/{name.removesuffix('.npz')}.npz"
