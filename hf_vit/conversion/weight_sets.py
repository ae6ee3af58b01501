"""Several sets of weights in one file: raw and averaged ones, a student and its teacher, two encoders."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.utils import logging

from .tables import ConversionError

logger = logging.get_logger(__name__)

# Names of weights that are a moving average of others, as timm, DINO, Lightning and others write them.
_AVERAGED = r"ema|averaged?|avg|swa|shadow|teacher"
# Encoders that are trained together and differ: BYOL's and MoCo's. Which of them is wanted, only the user knows.
_PAIRS = (("online", "target"), ("query", "key"), ("encoder_q", "encoder_k"), ("base", "momentum"))
_OF_THE_RUN = r"callbacks|loops"  # of Lightning
_MAX_DEPTH = 8


def find_weight_sets(contents: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return the dictionaries of arrays in the contents of a file: path of keys -> arrays; "" for the root.

    A dictionary with less than half as many arrays as the largest one is no set of weights, nor is the state of an
    optimizer.
    """
    found = dict(_dictionaries(contents, "", 0))
    most = max(map(len, found.values()), default=0)
    return {path: arrays for path, arrays in found.items() if 2 * len(arrays) >= most}


def _dictionaries(contents: Any, path: str, depth: int) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    if not isinstance(contents, dict) or depth > _MAX_DEPTH:
        return
    arrays = {str(name): value for name, value in contents.items() if isinstance(value, torch.Tensor)}
    if arrays:
        yield path, arrays
    for name, value in contents.items():
        if isinstance(name, str) and "optim" not in name:
            yield from _dictionaries(value, f"{path}/{name}".removeprefix("/"), depth + 1)


def choose_weights(names: Sequence[str], wanted: str | None, file: str) -> str:
    """Return the name of the weights to read: the one that is asked for, the only one, or the averaged one.

    Args:
        names: paths of keys, or prefixes of names of arrays.
        wanted: one of them, with or without the last separator.
        file: name of the file, for messages.

    Raises:
        ConversionError: there is no `wanted`; or there are several, and which of them is meant is not known.
    """
    shown = ", ".join(_shown(name) for name in names)
    if wanted is not None:
        for name in names:
            if wanted in (name, _shown(name)):
                return name
        raise ConversionError(f"{file} has no weights {wanted!r}; it has {shown}")
    if len(names) == 1:
        return names[0]
    advice = "choose one: `hf-vit convert --weights NAME`, or `convert(..., weights=NAME)`"
    for first, second in _PAIRS:
        if _with_word(names, first) and _with_word(names, second):
            raise ConversionError(f"{file} holds two encoders, {shown}; {advice}")
    averaged = _with_word(names, _AVERAGED)
    if len(averaged) != 1 or _with_word(names, _OF_THE_RUN):
        raise ConversionError(f"{file} holds several sets of weights: {shown}; {advice}")
    logger.warning(f"{file} holds several sets of weights: {shown}. Read: {_shown(averaged[0])}, the averaged one")
    return averaged[0]


def _shown(name: str) -> str:
    return name.strip("./") or "the root"


def _with_word(names: Sequence[str], word: str) -> list[str]:
    return [name for name in names if re.search(rf"(?:^|[./_])(?:{word})(?:$|[./_\d])", name)]
