"""Lines on standard error about a dataset: one for each split, and one for each reason why something is not used."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..files.messages import join_names, printable
from ..files.output import write_text
from .layout import split_named

if TYPE_CHECKING:
    from .sources import Source
    from .splits import Split

UNUSED_FILES = "unused_files.txt"  # of an output folder: a line for each name, after the reason
_SHOWN = 3  # names in a line
logger = logging.getLogger(__name__)


def log_splits(source: "Source", used: Mapping[str, "Split"]) -> None:
    """Log a line for each split of a dataset, and one for each reason why something is not used.

    Args:
        used: the splits that the command uses, by their names or slices.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    names = {source.resolve(name): split for name, split in used.items()}
    for name, split in names.items():
        logger.warning("%s: %s", name, _describe(split) + _describe_source(source, name))
    parts = {part.partition("[")[0].strip() for name in names for part in name.split("+")}
    for name, samples in source.splits.items() if source.is_folder else ():
        if name not in parts:
            folders = _describe_source(source, name)
            logger.warning("%s: %s, not used%s%s", name, _count(len(samples), "image"), folders, _hint(name))
    for name, files in source.sources.items() if not source.is_folder else ():
        if name not in parts:
            logger.warning("%s: %s, not used (%s)%s", name, _count(len(files), "file"), _listing(files), _hint(name))
    for reason, unused in source.unused.items():
        logger.warning("%s: %s: %s (%s)", source.name, reason, f"{len(unused):,}", _listing(unused))


def _describe(split: "Split") -> str:
    text = _count(len(split), "image")
    if split.label_column is not None:
        count = split.num_labels if split.is_sharded else len(split.class_indices())
        text += f", {_count(count, 'class', 'classes')}"
    return text


def _hint(name: str) -> str:
    return "" if split_named(name) else f": its name is no split; --eval-split {name} evaluates on it"


def _describe_source(source: "Source", name: str) -> str:
    """Return the user's folders or files of a split, in parentheses."""
    parts = [part.partition("[")[0].strip() for part in name.split("+")]
    folders = [folder for part in parts for folder in source.sources.get(part, ()) if folder]
    kind = "" if source.is_folder else f"{_count(len(folders), 'file')}: "
    return f" ({kind}{_listing(folders)})" if folders else ""


def log_holdout(held_out: "Split | None", fraction: float) -> None:
    """Log what is held out of the training images."""
    if os.environ.get("RANK", "0") != "0":
        return
    if held_out is None:
        logger.warning("held out: nothing, of shards and of fewer than 10 images")
    else:
        share = f"{fraction:.3g}" if held_out.targets else f"{fraction:.3g} of each class"
        logger.warning("held out: %s (%s)", _describe(held_out), share)


def log_classes_without_evaluation(train: "Split", evaluation: "Split | None") -> None:
    """Log which classes have training images but no images for evaluation."""
    if evaluation is None or any(one.is_sharded or one.label_column is None for one in (train, evaluation)):
        return
    evaluated = set(evaluation.class_indices())
    names = train.label_names or [f"class {number}" for number in range(train.num_labels)]
    missing = [names[number] for number in train.class_indices() if number not in evaluated]
    if missing and os.environ.get("RANK", "0") == "0":
        count = _count(len(missing), "class is", "classes are")
        logger.warning("%s not evaluated, for want of images: %s", count, _listing(missing))


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def _listing(names: list[str]) -> str:
    return printable(join_names(names, _SHOWN))


def write_unused(output: Path, unused: Mapping[str, list[str]]) -> None:
    """Write the names of everything that is not used to a file of an output folder."""
    if unused:
        lines = [f"{reason}: {name}" for reason, names in unused.items() for name in names]
        write_text(output / UNUSED_FILES, "\n".join([*lines, ""]))
