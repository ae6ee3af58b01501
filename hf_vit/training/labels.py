"""Class numbers of data, as a model or another split counts them: matched by name, or refused."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..catalog.class_names import imagenet_numbers
from ..files.reading import read_text, read_yaml
from .data import Split
from .shards import Shards

_SHOWN = 5  # names of each list in a message
_LONGEST = 40  # characters of a name in a message
_logger = logging.getLogger(__name__)


def match_to_model(split: Split, config: Any, model: str, label_map: str | None = None) -> Split:
    """Number the labels of a split as a model's classes are, by name.

    Names that are equal belong together, in any order; so do ImageNet's wnids and its classes in words. Where the data
    or the model have no names (LABEL_0 is none), and where the data's names are numerals, the numbers count, and a
    message says so.

    Args:
        config: the model's configuration; `model`, its name in messages.
        label_map: YAML or JSON file, the data's name -> the model's name or number.

    Raises:
        ValueError: the model does not have a class of the data; with both lists, shortened, and what nearly matches.
    """
    theirs = names_of(config)
    given = {} if label_map is None else read_label_map(label_map)
    numbers = _match(split, theirs, ("the data", model), given, "state which is which with --label-map FILE")
    return replace(split, numbers=numbers, num_labels=len(theirs))


def match_to_split(split: Split, other: Split, name: str, other_name: str) -> Split:
    """Number the labels of `other` as those of `split`, by the rules of `match_to_model`.

    Args:
        name, other_name: of the splits, in messages.

    Raises:
        ValueError: `other` has labels that `split` does not have.
    """
    if split.multi_label != other.multi_label:
        several, one = (name, other_name) if split.multi_label else (other_name, name)
        raise ValueError(f"{several} has several labels per image, {one} has one")
    if split.label_names == other.label_names and split.num_labels >= other.num_labels:
        return replace(other, num_labels=split.num_labels)
    theirs = split.label_names or [f"LABEL_{number}" for number in range(split.num_labels)]
    numbers = _match(other, theirs, (other_name, name), {}, "give the classes the same names in both")
    return replace(other, numbers=numbers, num_labels=split.num_labels)


def state_classes(split: Split, num_labels: int | None, names_file: str | None) -> Split:
    """Give a split the classes that the user states.

    Args:
        num_labels: how many there are; the data may have fewer.
        names_file: a text file with a name on each line, in the order of the class numbers.

    Raises:
        ValueError: the data have other classes or more, or the two numbers differ.
    """
    names = None if names_file is None else read_text(Path(names_file).expanduser()).split("\n")
    if names is not None:
        names = [name.strip() for name in names if name.strip()]
        if num_labels not in (None, len(names)):
            raise ValueError(f"--num-labels is {num_labels}, and {names_file} has {len(names)} names")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{names_file} has the name {_short(twice)} more than once")
    count = len(names) if names is not None else num_labels
    if count is None or split.label_column is None:
        return split
    if names is not None and split.label_names not in (None, names):
        return _order_names(split, names, str(names_file))
    if split.num_labels > count:
        raise ValueError(f"the data have {split.num_labels} classes, and {count} are stated")
    return replace(split, label_names=names or split.label_names, num_labels=count)


def _order_names(split: Split, names: list[str], file: str) -> Split:
    """Number the classes of shards that have names in the order of a list, which may have more."""
    ours = split.label_names or []
    missing = [name for name in ours if name not in names]
    if missing or split.multi_label or not isinstance(split.samples, Shards):
        raise ValueError(
            f"the classes of the data ({len(ours)}: {_listing(ours)}) are not those of {file} "
            f"({len(names)}: {_listing(names)}), which lacks {_listing(missing) or 'their order'}"
        )
    samples = split.samples.renumbered([names.index(name) for name in ours])
    return replace(split, samples=samples, label_names=names, num_labels=len(names))


def read_label_map(place: str) -> dict[str, str | int]:
    """Read a file that states which of a model's classes each of the data's is.

    Raises:
        ValueError: it is no mapping of names to names or class numbers.
    """
    content = read_yaml(Path(place).expanduser())
    if not isinstance(content, dict):
        raise ValueError(f"{place} is a {type(content).__name__} (expected a mapping: the data's name -> the model's)")
    for key, value in content.items():
        if isinstance(key, bool) or isinstance(value, bool) or not isinstance(key, str | int):
            raise ValueError(f"{place}: {str(key)[:_LONGEST]!r} is read as a {type(key).__name__}; put names in quotes")
        if not isinstance(value, str | int):
            raise ValueError(f"{place}: {key!r} leads to a {type(value).__name__} (expected a name or a class number)")
    return {str(key): value for key, value in content.items()}


def _match(
    split: Split, theirs: Sequence[str], who: tuple[str, str], given: dict[str, str | int], remedy: str
) -> list[int] | None:
    """For each class of the split its number among `theirs`; None where the numbers are the same.

    Args:
        who: the owners of the two lists; `given`, what the user says; `remedy`, what to do about a mismatch.
    """
    ours = split.label_names
    if ours is None or (_are_no_names(theirs) and not given):
        return _by_number(split, theirs, who)
    named = _resolve(given, ours, theirs)
    rest = [name for name in ours if name not in named]
    if not named and ours == list(theirs):
        return None
    if not named and (numbers := _by_imagenet(ours, theirs)) is not None:
        return numbers
    found = {name: number for number, name in enumerate(theirs)}
    if any(name not in found or theirs.count(name) > 1 for name in rest):
        if not named and (numbers := _by_numerals(ours, theirs, who)) is not None:
            return numbers
        raise ValueError(_describe_mismatch(ours, theirs, rest, who, remedy))
    return [named[name] if name in named else found[name] for name in ours]


def _by_number(split: Split, theirs: Sequence[str], who: tuple[str, str]) -> list[int] | None:
    """Match where a side has no names."""
    ours = split.label_names
    if ours is not None and (numbers := _by_imagenet(ours, theirs) or _by_numerals(ours, theirs, who)) is not None:
        return numbers
    if split.num_labels > len(theirs):
        raise ValueError(f"{who[0]} has {split.num_labels} labels and {who[1]} has {len(theirs)}")
    if ours is not None and len(ours) > 1 and all(map(str.isdecimal, ours)):
        raise ValueError(f"{who[0]} has the classes {_listing(ours)}, which are no numbers of {len(theirs)} classes")
    nameless = who[0] if ours is None else who[1]
    _say(f"{nameless} does not name its classes: class numbers 0 to {split.num_labels - 1} are taken as they are")
    return None


def _by_imagenet(ours: Sequence[str], theirs: Sequence[str]) -> list[int] | None:
    """Match classes that both are ImageNet's, where their names differ; 1000 classes without names may be those."""
    numbers = imagenet_numbers(ours)
    if numbers is None:
        return None
    columns = list(range(len(theirs))) if _are_no_names(theirs) and len(theirs) == 1000 else imagenet_numbers(theirs)
    if columns is None or not set(numbers) <= set(columns):
        return None
    return [columns.index(number) for number in numbers]


def _by_numerals(ours: Sequence[str], theirs: Sequence[str], who: tuple[str, str]) -> list[int] | None:
    """Match names that are class numbers: folders 0, 1, 10, 11, 2, which are sorted as text."""
    if not all(name.isdecimal() and int(name) < len(theirs) for name in ours) or len(set(map(int, ours))) < len(ours):
        return None
    _say(f"{who[0]} names its classes by numbers: {_listing(ours)} are taken as class numbers of {who[1]}")
    return [int(name) for name in ours]


def _resolve(given: dict[str, str | int], ours: Sequence[str], theirs: Sequence[str]) -> dict[str, int]:
    """What the user says, as class numbers."""
    if unknown := [name for name in given if name not in ours]:
        raise ValueError(f"the label map has {_listing(unknown)}, and the data have {_listing(ours)}")
    numbers: dict[str, int] = {}
    for name, target in given.items():
        if isinstance(target, str) and theirs.count(target) == 1:
            numbers[name] = theirs.index(target)
        elif isinstance(target, int) and 0 <= target < len(theirs):
            numbers[name] = target
        else:
            raise ValueError(f"the label map leads from {name!r} to {target!r}; the model has {_listing(theirs)}")
    return numbers


def _are_no_names(names: Sequence[str]) -> bool:
    return all(name == f"LABEL_{number}" for number, name in enumerate(names))


def _describe_mismatch(
    ours: Sequence[str], theirs: Sequence[str], rest: Sequence[str], who: tuple[str, str], remedy: str
) -> str:
    """One sentence: both lists, the names without a counterpart, and those that nearly have one."""
    known: dict[str, str] = {_bare(name): name for name in theirs}
    missing = [name for name in rest if theirs.count(name) != 1]
    pairs = [f"{_short(name)} and {_short(known[_bare(name)])}" for name in missing if _bare(name) in known]
    nearly = f"; nearly the same are {_join(pairs)}" if pairs else ""
    return (
        f"the classes of {who[0]} ({len(ours)}: {_listing(ours)}) are not those of {who[1]} "
        f"({len(theirs)}: {_listing(theirs)}), where no one class is called {_listing(missing)}{nearly}; {remedy}"
    )


def _bare(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


def _listing(names: Sequence[str]) -> str:
    return _join(map(_short, names))


def _join(entries: Iterable[str]) -> str:
    entries = list(entries)
    more = [f"{len(entries) - _SHOWN} more"] if len(entries) > _SHOWN else []
    return ", ".join([*entries[:_SHOWN], *more])


def _short(name: str) -> str:
    return repr(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}...")


def _say(text: str) -> None:
    """Tell the user, once on each machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _logger.warning(text)


def names_of(config: Any) -> list[str]:
    """The names of a model's classes, by number."""
    return [str(config.id2label.get(number, f"LABEL_{number}")) for number in range(config.num_labels)]


def distinguish(names: Sequence[str]) -> list[str]:
    """Class names by number, with the number behind those that occur twice, such as "crane" of ImageNet."""
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [f"{name} ({number})" if name in twice else name for number, name in enumerate(names)]
