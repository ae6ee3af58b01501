"""Class names that come with the package."""

import re
from collections.abc import Sequence
from importlib.resources import files

BUILT_IN = ("imagenet1k",)
_MAX_REWORDED = 50  # names of 1000 that may have another wording


def imagenet_numbers(names: Sequence[str]) -> list[int] | None:
    """Return each name's class number among ImageNet's 1000 classes; None if the classes are not ImageNet's.

    Two forms are recognized: wnids (n01440764) of any number of classes in any order, and 1000 names in words in
    ImageNet's order. The comparison of words ignores case, synonyms after a comma and notes in brackets. Up to 50 names
    may have a wording that ImageNet does not have; a name of another ImageNet class means another order, hence None.
    """
    by_wnid = {wnid: number for number, wnid in enumerate(built_in_class_names("imagenet1k_wnids"))}
    if names and all(name in by_wnid for name in names):
        return [by_wnid[name] for name in names]
    if len(names) != len(by_wnid):
        return None
    known = [_first_word(name) for name in built_in_class_names("imagenet1k")]
    others = [word for word, expected in zip(map(_first_word, names), known, strict=True) if word != expected]
    return list(range(len(names))) if len(others) <= _MAX_REWORDED and not set(others) & set(known) else None


def _first_word(name: str) -> str:
    return re.split(r"[,(]", name)[0].strip().casefold().replace("_", " ")


def built_in_class_names(name: str) -> list[str]:
    """Return the class names of a list, such as one of `BUILT_IN`, in the order of the head's outputs."""
    return (files("hf_vit.catalog") / "labels" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
