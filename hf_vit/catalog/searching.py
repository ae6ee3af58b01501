"""Search for checkpoints in released.yaml, or in AugReg's index of 51,509 fine-tuned files; description of a file."""

import csv
import os
import re
from io import StringIO
from typing import Any, NamedTuple

from ..files.download import fetch
from ..files.reading import read_text
from ..models.utils import check_choice
from .released import (
    ADAPTED_TO,
    AUGREG,
    AUGREG_MODELS,
    INDEX,
    Released,
    bare_name,
    copies_of,
    data_set_name,
    families,
    find_released,
    parse_augreg,
    refused,
    released,
    released_facts,
    variants,
)

# Columns of the index
_NUMBERS = ("final_val", "adapt_resolution", "adapt_final_val", "adapt_final_test")
_FILE = re.compile(r"[\w.+-]*")  # a file name in the index, without folders; empty for a model without fine-tuning
_TEXTS = ("name", "ds", "filename", "adapt_ds", "adapt_filename")


class Found(NamedTuple):
    """A result of `search`: the address of a file, and a description in words."""

    location: str
    about: str


def search(
    variant: str,
    adapted_to: str | None = None,
    resolution: int | None = None,
    index: str | os.PathLike | None = None,
    limit: int = 10,
) -> list[Found]:
    """Find checkpoints of an architecture; with an index, those with the best validation accuracy first.

    Args:
        variant: architecture, such as "B/16" or "R50+L/32".
        adapted_to: data set of fine-tuning, under its name in file names: "imagenet2012", "cifar100", "kitti",
            "oxford_iiit_pet" or "resisc45". None means all; with an index and no `resolution`, it means models without
            fine-tuning.
        resolution: image size of fine-tuning, in pixels.
        index: path or URL of index.csv, which lists AugReg's 51,509 fine-tuned files. Without it, the built-in list
            (recommended AugReg files and the other buckets) is searched.
        limit: maximum number of results.

    Raises:
        ValueError: the architecture or data set is unknown, or the index lacks a column.
    """
    check_choice("architecture", variant, variants())
    if adapted_to is not None:
        check_choice("data set", adapted_to, ADAPTED_TO)
    if index is None:
        data = ADAPTED_TO.get(adapted_to or "")
        found = []
        for entry in released():
            datasets = entry.facts["datasets"]
            is_adapted = data is None or (len(datasets) > 1 and datasets[-1] == data)
            has_size = resolution in (None, entry.facts.get("resolution"))
            if _plain(entry.variant) == _plain(variant) and is_adapted and has_size:
                found.append(Found(entry.location, entry.facts["title"]))
        if adapted_to is None and resolution is None:
            for family, facts in released_facts()["patterns"].items():
                found += files_of(family) if variant in facts["variants"] else []
        return found[:limit]
    rows = [row for row in _read_index(index) if row["name"] == variant]
    if adapted_to is None and resolution is None:
        best = sorted({(row["final_val"], row["filename"], row["ds"]) for row in rows}, reverse=True)
        return [Found(f"{AUGREG}/{file}.npz", f"pre-trained on {ds}: {value:.4f}") for value, file, ds in best[:limit]]
    chosen = [
        row for row in rows
        if adapted_to in (None, row["adapt_ds"]) and resolution in (None, row["adapt_resolution"])
    ]  # fmt: skip
    chosen.sort(key=lambda row: row["adapt_final_val"], reverse=True)
    return [
        Found(
            f"{AUGREG}/{row['adapt_filename']}.npz",
            f"{row['adapt_ds']}: validation {row['adapt_final_val']:.4f}, test {row['adapt_final_test']:.4f}",
        )
        for row in chosen[:limit]
    ]


def _plain(variant: str) -> str:
    """Return the architecture without its variation, mean pooling without a pre-logits layer."""
    return variant.removesuffix("-gap-norep")


def files_of(family: str) -> list[Found]:
    """Return every file of a family of released.yaml; for a family with very many files, only their name pattern.

    Raises:
        ValueError: no family has this name.
    """
    check_choice("family", family, families())
    if facts := released_facts()["patterns"].get(family):
        return [Found(f"{facts['location']}/{facts['file']}.npz", facts["title"])]
    return [Found(entry.location, entry.facts["title"]) for entry in released() if entry.family == family]


def _read_index(index: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the rows of AugReg's index.csv, given as a path or as a URL (downloaded once).

    Raises:
        ValueError: it lacks a column, or has an invalid row; the message names the line.
    """
    text = read_text(fetch(str(index)).path if "://" in str(index) else index)
    reader, rows = csv.DictReader(StringIO(text, newline=""), strict=True), []
    try:
        for row in reader:
            texts = {column: row[column] for column in _TEXTS}
            if not all(_FILE.fullmatch(texts[column]) for column in ("filename", "adapt_filename")):
                raise ValueError("a file name is not AugReg's")  # it decides what is downloaded
            rows.append({**texts, **{column: float(row[column]) for column in _NUMBERS}})
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        where = f"{index}, line {reader.line_num}"
        raise ValueError(f"cannot read {where}: {error!r} (expected AugReg's index.csv)") from error
    return rows


def best_augreg(variant: str, index: str | os.PathLike | None = None) -> str:
    """Return the name of the pre-trained AugReg file that the original code chooses for an architecture.

    The choice is the highest `final_val` among files pre-trained on ImageNet-21k for 300 epochs
    (google-research/vision_transformer, vit_jax/train.py). The nine files that its README recommends need no index.

    Args:
        variant: architecture, "B/16" or "B_16".
        index: path or URL of AugReg's index.csv. Default: the built-in list, then the published index for an
            architecture that is not in the list.

    Raises:
        ValueError: AugReg has no such architecture, or the index has no such file.
    """
    variant = AUGREG_MODELS.get(variant, variant)
    check_choice("architecture of AugReg", variant, AUGREG_MODELS.values())
    if index is None:
        for entry in released():
            if entry.family == "augreg" and entry.variant == variant and "--" not in entry.name:
                return entry.name
    rows = [row for row in _read_index(index or INDEX) if row["name"] == variant and row["ds"] == "i21k"]
    if not rows:
        raise ValueError(f"{index or INDEX} has no {variant} pre-trained on i21k")
    return max(rows, key=lambda row: row["final_val"])["filename"]


def _recommended(variant: str, resolution: int) -> str:
    """Return the name of the file to use for an architecture, fine-tuned on ImageNet-1k.

    At 384 pixels it is the one that the README of the original code recommends. It recommends none at 224 pixels: there
    it is the file that timm publishes too, chosen by accuracy.

    Raises:
        ValueError: there is none.
    """
    copied = (location.rpartition("/")[2] for location in released_facts()["copies"])
    names = [entry.name for entry in released() if entry.family == "augreg"] if resolution == 384 else copied
    for name in names:
        parsed = parse_augreg(name)
        if parsed is None or (parsed.data, parsed.adapted_to) != ("i21k", "imagenet2012"):
            continue
        if AUGREG_MODELS[parsed.model] == variant and parsed.resolution == str(resolution):
            return name
    known = ", ".join(AUGREG_MODELS.values())
    raise ValueError(f"there is no augreg:{variant}-{resolution} (expected {known}, also with -384 except for B/8)")


def address_of(source: str, index: str | os.PathLike | None = None) -> str:
    """Return the address that `augreg:...` stands for; any other `source` is returned as it is.

    `augreg:Ti/16` and `augreg:Ti/16-384` are files fine-tuned on ImageNet-1k, at 224 and 384 pixels; `augreg:best:B/16`
    is a pre-trained file; `augreg:NAME` the file of that name.

    Raises:
        ValueError: NAME is not the name of an AugReg file, or AugReg has no such architecture.
    """
    if not source.startswith("augreg:"):
        return source
    name = source.removeprefix("augreg:")
    if name.startswith("best:"):
        name = best_augreg(name.removeprefix("best:"), index)
    elif (match := re.fullmatch(r"(.*/\d+)(?:-(\d+))?", name)) is not None:
        name = _recommended(match[1], int(match[2] or 224))
    elif parse_augreg(name.removesuffix(".npz")) is None:
        raise ValueError(f"{name!r} is not the name of an AugReg file; give `augreg:best:B/16` to choose one")
    return f"{AUGREG}/{name.removesuffix('.npz')}.npz"


def explain(name: str) -> str:
    """Describe a released file in words.

    Args:
        name: name of a file, with or without its address and `.npz`: an AugReg name, `augreg:Ti/16`, `sam/ViT-B_16`,
            ... Where several files have the name, all of them are described.

    Raises:
        ValueError: no released file has this name.
    """
    name = address_of(name)
    bare = bare_name(name)
    entry = find_released(name)
    namesakes = [other for other in released() if other.name == bare]
    if entry is None and not namesakes:
        if (what := refused(name)) is not None:
            return f"{name}\nnot converted by hf_vit: {what}"
        raise ValueError(
            f"{name!r} is not a released file, an architecture ({', '.join(variants())}) "
            f"or a family ({', '.join(families())})"
        )
    return "\n\n".join(_describe(entry) for entry in ([entry] if entry else namesakes))


def _describe(entry: Released) -> str:
    facts = entry.facts
    resolution = facts.get("resolution")
    architecture = f"{'BiT' if entry.family.startswith('bit') else 'ViT'}-{_plain(entry.variant)}"
    lines = [
        entry.location if "://" in facts["location"] else f"{entry.location} ({facts['location']})",
        f"{architecture}, {facts['title']}"
        + (f"; {resolution} x {resolution} pixels" if resolution else "; its resolution is read from the file"),
    ]
    if "beside" in facts:
        lines.append(f"  also in the file, not converted: {', '.join(facts['beside'])}")
    lines += [f"  {label}: {text}" for label, text in facts["hyper_parameters"].items()]
    for result in facts.get("results", ()):
        of = f" of {result['of']}" if "of" in result else ""
        lines.append(
            f"  {data_set_name(result['dataset'])} {result['metric']}{of}: {result['value']}% "
            f"({result['source']['name']}, {result['table']})"
        )
    path = bare_name(entry.location).removeprefix("gs://")
    if copies := copies_of(entry.location):
        lines.append(f"  copies with the same weights: {', '.join(copies)}")
    if (fingerprint := released_facts()["fingerprints"].get(path)) is not None:
        lines.append(f"  fingerprint: {fingerprint}")
    return "\n".join(lines)
