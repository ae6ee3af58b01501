"""Default evaluation images: an existing split, or a part of the training split."""

import dataclasses

import numpy as np

from .samples import Split
from .shards import Shards
from .sources import names_of_splits

_NAMES = ("validation", "val", "valid", "dev", "test")  # the first existing one is used
_SHARE = 0.1  # held-out share of each class, if there is none of these splits
_FEWEST = 10  # smallest training split from which images are held out


def find_eval_split(dataset: str, config: str | None, train_split: str) -> str:
    """Return the name of the split to evaluate on; "auto" if only the training split exists."""
    names = names_of_splits(dataset, config)
    trained_on = train_split.split("[")[0]
    return next((name for name in _NAMES if name in names and name != trained_on), "auto")


def cut_off(split: Split) -> tuple[Split, Split | None]:
    """Divide a split into training images and a held-out tenth of each class, drawn with a fixed seed.

    Nothing is held out of shards and of fewer than 10 images.
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
    """Class numbers (images,); all 0 if images have no label or may have several."""
    if split.label_column is None or split.multi_label:
        return np.zeros(len(split), np.int64)
    return split.class_numbers()


def _is_held_out(classes: np.ndarray) -> np.ndarray:
    """Mark the first tenth of each class, rounded; at least one image in all."""
    marked = np.zeros(len(classes), bool)
    for number in np.unique(classes):
        rows = np.flatnonzero(classes == number)
        marked[rows[: round(_SHARE * len(rows))]] = True
    marked[: 0 if marked.any() else 1] = True
    return marked
