"""Match the class indices of data with those of a model or another split, by class name."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..catalog import imagenet_numbers
from ..files.messages import did_you_mean, join_names, shorten
from ..files.reading import read_text, read_yaml

if TYPE_CHECKING:
    from .splits import Split

_logger = logging.getLogger(__name__)


def match_to_model(split: "Split", config: Any, model: str, label_map: str | None = None) -> "Split":
    """Renumber the labels of a split with a model's class indices, by class name.

    Classes with equal names match, in any order; ImageNet's wnids match its class names. If the data or the model have
    no class names (LABEL_0 is not a name), or the data's names are numbers, class indices are used as they are, with a
    message.

    Args:
        config: the model's configuration.
        model: the model's name, for messages.
        label_map: YAML or JSON file, the data's name -> the model's name or number.

    Raises:
        ValueError: a class of the data does not match one of the model; the message has both lists, shortened, and
            names that nearly match.
    """
    theirs = names_of(config)
    given = {} if label_map is None else read_label_map(label_map)
    numbers = _match(split, theirs, ("the data", model), given, "match them with --label-map FILE")
    return _renumber(split, numbers, len(theirs))


def match_to_split(split: "Split", other: "Split", name: str, other_name: str) -> "Split":
    """Renumber the labels of `other` with the class indices of `split`, by the rules of `match_to_model`.

    Args:
        name, other_name: names of the splits, for messages.

    Raises:
        ValueError: `other` has labels that `split` does not have.
    """
    if split.targets:
        return other
    if split.multi_label != other.multi_label:
        several, one = (name, other_name) if split.multi_label else (other_name, name)
        raise ValueError(f"{several} has several labels per image, but {one} has one; both need the same kind")
    if split.label_names == other.label_names and split.num_labels >= other.num_labels:
        return replace(other, num_labels=split.num_labels)
    theirs = split.label_names or [f"LABEL_{number}" for number in range(split.num_labels)]
    numbers = _match(other, theirs, (other_name, name), {}, "give the classes the same names in both")
    return _renumber(other, numbers, split.num_labels)


def _renumber(split: "Split", numbers: list[int] | None, num_labels: int) -> "Split":
    """Replace each class index n of a split by numbers[n]; None: they stay as they are."""
    if numbers is not None and split.numbers is not None:
        numbers = [numbers[number] for number in split.numbers]
    return replace(split, numbers=split.numbers if numbers is None else numbers, num_labels=num_labels)


def state_classes(split: "Split", num_labels: int | None, names_file: str | None) -> "Split":
    """Set the classes of a split to those that the user states.

    Args:
        num_labels: number of classes; the data may have fewer.
        names_file: text file of class names, one per line, in the order of their numbers.

    Raises:
        ValueError: the data have other classes or more, or the two arguments contradict each other.
    """
    names = None
    count = num_labels
    if names_file is not None:
        names = _read_names(names_file, num_labels)
        count = len(names)
    if count is None or split.label_column is None:
        return split
    if names is not None and split.label_names not in (None, names):
        missing = [name for name in split.label_names if name not in names]
        if missing:
            raise ValueError(f"{names_file} lacks {_listing(missing)}, classes of the data")
        indices = [names.index(name) for name in split.label_names]
        return _renumber(replace(split, label_names=names), indices, count)
    if split.num_labels > count:
        raise ValueError(f"the data has {split.num_labels} classes, but num_labels or label_names has {count}")
    return replace(split, label_names=names or split.label_names, num_labels=count)


def _read_names(names_file: str, num_labels: int | None) -> list[str]:
    """Read a text file of class names, one per line."""
    lines = read_text(Path(names_file).expanduser()).split("\n")
    names = [line.strip() for line in lines if line.strip()]
    if len(set(names)) < len(names) or num_labels not in (None, len(names)):
        raise ValueError(
            f"{names_file} has {len(names)} names, {len(set(names))} of them different (expected different names, as "
            "many as --num-labels, if it is given)"
        )
    return names


def require_labels(split: "Split", name: str, two_classes: bool = False) -> None:
    """Raise ValueError if images of a split have no label, or an unknown class index.

    An image that may have several labels may have an empty list. The labels of shards are not read in advance.

    Args:
        name: the split's name, for the message.
        two_classes: also if all images have the same labels.
    """
    if split.label_column is None:
        return
    if not split.is_sharded:
        counts = split.label_counts()
        known = set(range(split.num_labels))
        missing = sum(count for labels, count in counts.items() if not known.issuperset(labels))
        if missing:
            raise ValueError(
                f"{missing} of {len(split)} images of {name} have no label, or an unknown one (expected class indices "
                f"from 0 to {split.num_labels - 1}): choose another split, or leave these images out"
            )
        different = {frozenset(labels) for labels in counts}
        if two_classes and len(different) == 1:
            names = split.label_names or [f"class {index}" for index in range(split.num_labels)]
            (labels,) = different
            shown = _listing([names[index] for index in sorted(labels)]) or "none"
            raise ValueError(f"all {len(split)} images of {name} have the same label: {shown} (expected two classes)")
    if two_classes:
        _refuse_too_many_classes(split, name)


def _refuse_too_many_classes(split: "Split", name: str) -> None:
    """Raise ValueError if a column that no option named has more values than half of the images, as an id or a year."""
    if split.are_counted and not split.multi_label and split.num_labels > len(split) / 2:
        raise ValueError(
            f"the column {split.label_column} of {name} has {split.num_labels:,} classes for {len(split):,} images: "
            "name the column of the labels with --label-column (also if it is this one)"
        )


def read_label_map(path: str) -> dict[str, str | int]:
    """Read a label map: the data's class names -> the model's class names or numbers.

    Raises:
        ValueError: the file is not such a mapping.
    """
    content = read_yaml(Path(path).expanduser())
    for key, value in content.items() if isinstance(content, dict) else [(content, None)]:
        if type(key) not in (str, int) or type(value) not in (str, int):
            raise ValueError(
                f"{path} maps {shorten(key)} to {shorten(value)} (expected the data's name -> the model's name or "
                "number; put names such as no in quotes)"
            )
    return {str(key): value for key, value in content.items()}


def _match(
    split: "Split", theirs: Sequence[str], who: tuple[str, str], given: dict[str, str | int], remedy: str
) -> list[int] | None:
    """Number among `theirs` of each class of the split; None if all numbers stay the same.

    Args:
        who: names of the two sides, for messages.
        given: matches stated by the user.
        remedy: advice in the message about a mismatch.
    """
    ours = split.label_names or []
    stated = _resolve(given, ours, theirs)
    has_names = bool(stated) or (bool(ours) and not _are_no_names(theirs))
    if has_names and not stated and ours == list(theirs):
        return None
    by_name = _unique_indices(theirs) | stated
    missing = [name for name in ours if name not in by_name]
    if ours and not stated:
        indices = _by_imagenet(ours, theirs)
        if indices is None and missing:
            indices = _by_numerals(ours, theirs, who)
        if indices is not None:
            return indices
    if not has_names:
        _check_nameless(split, theirs, who)
        return None
    if missing:
        raise ValueError(
            f"the classes of {who[0]} ({len(ours)}: {_listing(ours)}) are not those of {who[1]} "
            f"({len(theirs)}: {_listing(theirs)}), which has no single class called {_listing(missing)}"
            f"{did_you_mean(missing[0], theirs)}; {remedy}"
        )
    return [by_name[name] for name in ours]


def _unique_indices(names: Sequence[str]) -> dict[str, int]:
    """Return the index of each name that occurs once."""
    counts = Counter(names)
    return {name: index for index, name in enumerate(names) if counts[name] == 1}


def _check_nameless(split: "Split", theirs: Sequence[str], who: tuple[str, str]) -> None:
    """Warn that class indices are used as they are, since one side has no class names.

    Raises:
        ValueError: the split has more classes than the other side, or its names are other numbers.
    """
    ours = split.label_names or []
    are_other_numbers = len(ours) > 1 and all(map(str.isdecimal, ours))
    if split.num_labels > len(theirs) or are_other_numbers:
        raise ValueError(
            f"{who[0]} has {split.num_labels} classes ({_listing(ours) or 'without names'}), but {who[1]} has "
            f"{len(theirs)} (expected class indices from 0 to {len(theirs) - 1})"
        )
    nameless = who[1] if ours else who[0]
    _warn(f"{nameless} has no class names: class indices 0 to {split.num_labels - 1} are used as they are")


def _by_imagenet(ours: Sequence[str], theirs: Sequence[str]) -> list[int] | None:
    """Match ImageNet classes with different names on the two sides; 1000 classes without names may be ImageNet's."""
    numbers = imagenet_numbers(ours)
    if numbers is None:
        return None
    columns = imagenet_numbers(theirs)
    if len(theirs) == 1000 and _are_no_names(theirs):
        columns = list(range(1000))
    if columns is None or not set(numbers) <= set(columns):
        return None
    return [columns.index(number) for number in numbers]


def _by_numerals(ours: Sequence[str], theirs: Sequence[str], who: tuple[str, str]) -> list[int] | None:
    """Match names that are class indices, such as folders 0, 1, 10, 11, 2, which are sorted as text."""
    if not all(name.isdecimal() for name in ours):
        return None
    indices = [int(name) for name in ours]
    if max(indices) >= len(theirs) or len(set(indices)) < len(indices):
        return None
    _warn(f"the class names of {who[0]} are numbers: {_listing(ours)} are used as class indices of {who[1]}")
    return indices


def _resolve(given: dict[str, str | int], ours: Sequence[str], theirs: Sequence[str]) -> dict[str, int]:
    """Convert a label map to class indices."""
    numbers: dict[str, int] = {}
    for name, target in given.items():
        number = theirs.index(target) if isinstance(target, str) and theirs.count(target) == 1 else target
        if name not in ours or not isinstance(number, int) or number not in range(len(theirs)):
            raise ValueError(
                f"the label map maps {name!r} to {target!r}, but the data has {_listing(ours)}, and the model "
                f"{_listing(theirs)}"
            )
        numbers[name] = number
    return numbers


def _are_no_names(names: Sequence[str]) -> bool:
    return all(name == f"LABEL_{number}" for number, name in enumerate(names))


def _listing(names: Sequence[str]) -> str:
    return join_names([shorten(name) for name in names])


def _warn(text: str) -> None:
    """Warn the user, once per machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _logger.warning(text)


def names_of(config: Any) -> list[str]:
    """Return the names of a model's classes, by number."""
    return [str(config.id2label.get(number, f"LABEL_{number}")) for number in range(config.num_labels)]


def distinguish(names: Sequence[str]) -> list[str]:
    """Append the class index to names that occur twice, such as ImageNet's "crane"."""
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [f"{name} ({number})" if name in twice else name for number, name in enumerate(names)]
