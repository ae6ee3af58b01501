"""Find a checkpoint: in released.yaml, or in AugReg's index of 51,509 fine-tuned files."""

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..files.download import fetch
from .augreg import ADAPTED_TO, AUGREG, AUGREG_MODELS, INDEX, parse_augreg
from .released import Released, released, variants

COLUMNS = ("name", "ds", "final_val", "adapt_ds", "adapt_resolution", "adapt_final_val", "adapt_final_test",
           "filename", "adapt_filename")  # fmt: skip


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
        return [Found(entry.location, entry.facts["title"]) for entry in found][:limit]
    rows = (row for row in _read_index(index) if row["name"] == variant)
    if adapted_to is None and resolution is None:
        best = sorted({(float(row["final_val"]), row["filename"], row["ds"]) for row in rows}, reverse=True)
        return [Found(f"{AUGREG}/{file}.npz", f"pre-trained on {ds}: {value:.4f}") for value, file, ds in best[:limit]]
    chosen = [
        row for row in rows
        if adapted_to in (None, row["adapt_ds"]) and resolution in (None, int(float(row["adapt_resolution"])))
    ]  # fmt: skip
    chosen.sort(key=lambda row: float(row["adapt_final_val"]), reverse=True)
    return [
        Found(
            f"{AUGREG}/{row['adapt_filename']}.npz",
            f"{row['adapt_ds']}: validation {float(row['adapt_final_val']):.4f}, "
            f"test {float(row['adapt_final_test']):.4f}",
        )
        for row in chosen[:limit]
    ]


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
        ValueError: it lacks a column.
    """
    path = Path(index)
    if "://" in str(index):
        path = fetch(str(index)).path
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
            raise ValueError(f"{index} is not the index of AugReg; it lacks {', '.join(missing)}")
        yield from reader


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
    return max(rows, key=lambda row: float(row["final_val"]))["filename"]


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
