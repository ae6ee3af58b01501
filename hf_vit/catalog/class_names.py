"""Names of classes that come with the package."""

import re
from collections.abc import Sequence
from importlib.resources import files

BUILT_IN = ("imagenet1k",)
_MAX_REWORDED = 50  # of the 1000 names in words


def built_in_class_names(name: str) -> list[str]:
    """The names of one of `BUILT_IN`, in the order of the head's outputs."""
    return _lines_of(name)


def imagenet_numbers(names: Sequence[str]) -> list[int] | None:
    """For each name the number of its class among ImageNet's 1000; None for other classes.

    Recognised are wnids (n01440764) of any number of classes, in any order, and 1000 names in words, in ImageNet's
    order. Words are compared up to case, synonyms after a comma and notes in brackets; a name that ImageNet does not
    have is another wording, but one of another class is another order.
    """
    by_wnid = {wnid: number for number, wnid in enumerate(_lines_of("imagenet1k_wnids"))}
    if names and all(name in by_wnid for name in names):
        return [by_wnid[name] for name in names]
    if len(names) != len(by_wnid):
        return None
    known = [_first_word(name) for name in _lines_of("imagenet1k")]
    others = [word for word, expected in zip(map(_first_word, names), known, strict=True) if word != expected]
    return list(range(len(names))) if len(others) <= _MAX_REWORDED and not set(others) & set(known) else None


def _first_word(name: str) -> str:
    return re.split(r"[,(]", name)[0].strip().casefold().replace("_", " ")


def _lines_of(name: str) -> list[str]:
    return (files("hf_vit.catalog") / "labels" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
