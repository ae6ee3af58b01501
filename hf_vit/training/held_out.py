"""Images to evaluate on where nobody said which: a split that there is, or a part of the training split."""

import dataclasses

import numpy as np

from .data import Split
from .settings import AUTO
from .shards import Shards
from .sources import names_of_splits

_NAMES = ("validation", "val", "valid", "dev", "test")  # the first that there is
_SHARE = 0.1  # of each class, where there is none
_FEWEST = 10  # images that such a part needs


def find_eval_split(dataset: str, config: str | None, train_split: str) -> str:
    """The name of the split to evaluate on: "auto" where a part of the training split has to do."""
    names = names_of_splits(dataset, config)
    trained_on = train_split.split("[")[0]
    return next((name for name in _NAMES if name in names and name != trained_on), AUTO)


def cut_off(split: Split) -> tuple[Split, Split | None]:
    """Divide a split into what is trained on and a tenth of each class (drawn, with a fixed seed) to evaluate on.

    Of fewer than 10 images, and of shards, nothing is held out.
    """
    if isinstance(split.samples, Shards) or len(split) < _FEWEST:
        return split, None
    drawn = np.random.default_rng(0).permutation(len(split))
    held_out = np.sort(drawn[_is_held_out(_classes_of(split)[drawn])])
    rest = np.setdiff1d(np.arange(len(split)), held_out)
    parts = (split.samples.select(rows) for rows in (rest, held_out))
    train, test = (dataclasses.replace(split, samples=samples) for samples in parts)
    return train, test


def _classes_of(split: Split) -> np.ndarray:
    """Class numbers (images,); all the same where an image has none, or several."""
    if split.label_column is None or split.multi_label:
        return np.zeros(len(split), np.int64)
    return split.class_numbers()


def _is_held_out(classes: np.ndarray) -> np.ndarray:
    """Mark the first tenth of each class, rounded; and one image at least."""
    marked = np.zeros(len(classes), bool)
    for number in np.unique(classes):
        rows = np.flatnonzero(classes == number)
        marked[rows[: round(_SHARE * len(rows))]] = True
    marked[: 0 if marked.any() else 1] = True
    return marked
