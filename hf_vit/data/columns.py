"""Columns of images and of labels: their types, and which one is meant; names count before types."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import datasets

# A column with one of these names, in any case, has the labels, whatever other columns there are.
LABEL_NAMES = ("label", "labels", "class", "classes", "category", "categories", "target")
_TEXT = ("string", "large_string")
# Types of lists of labels.
_LISTED = (*_TEXT, "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


def is_image(feature: Any) -> bool:
    """Return whether a column has images."""
    return isinstance(feature, datasets.Image)


def is_image_struct(feature: Any) -> bool:
    """Return whether a column has what an image column stores, without its type: bytes and paths."""
    return isinstance(feature, dict) and feature.keys() == {"bytes", "path"}


def is_text(feature: Any) -> bool:
    """Return whether a column has text."""
    return isinstance(feature, datasets.Value) and feature.dtype in _TEXT


def is_list_of(feature: Any, kind: type) -> bool:
    """Return whether a column has lists of `kind`."""
    return isinstance(feature, datasets.List | datasets.LargeList) and isinstance(feature.feature, kind)


def find_column(features: Mapping[str, Any], name: str | None, fits: Callable[[Any], bool], what: str) -> str:
    """Return the column called `name`; without a name, the only column that fits.

    Args:
        what: kind of the column, "image" or "label", in the message.

    Raises:
        ValueError: there is no such column, or not exactly one fits; the message lists the columns.
    """
    if name is not None:
        if name not in features:
            raise ValueError(f"there is no column {name!r}; the columns are {', '.join(features)}")
        return name
    found = [column for column, feature in features.items() if fits(feature)]
    if len(found) != 1:
        several = f"there are {len(found)} columns of type {what}, {', '.join(found)}: choose one with --{what}-column"
        count = several if found else f"there is no column of type {what}"
        raise ValueError(f"{count}; the columns are {_listing(features)}")
    return found[0]


# Kinds of label columns; without a name, a column of the first kind that exists is taken.
_LABELS: tuple[Callable[[Any], bool], ...] = (
    lambda feature: isinstance(feature, datasets.ClassLabel),
    lambda feature: is_list_of(feature, datasets.ClassLabel),
    lambda feature: isinstance(feature, datasets.Value) and "int" in feature.dtype,
    lambda feature: is_list_of(feature, datasets.Value) and feature.feature.dtype in _LISTED,
)


def has_classes(features: Mapping[str, Any]) -> bool:
    """Return whether a column has classes by its type."""
    return any(is_label(feature) for is_label in _LABELS for feature in features.values())


def named_like_labels(columns: Iterable[str]) -> list[str]:
    """Return the columns whose names say that they have labels."""
    return [column for column in columns if column.lower() in LABEL_NAMES]


def find_label_column(features: Mapping[str, Any], name: str | None) -> str:
    """Return the column called `name`.

    By default the one with a name of `LABEL_NAMES`; without such a name the column of class labels, else of lists of
    them, else of integers, else of lists of names or integers.

    Raises:
        ValueError: there is no such column, or not exactly one, or it has no labels.
    """
    if name is None:
        named = [column for column in named_like_labels(features) if _may_be_labels(features[column])]
        if len(named) > 1:
            raise ValueError(f"the columns {', '.join(named)} may all have the labels: choose one with --label-column")
        if named:
            return named[0]
        for is_label in _LABELS:
            if any(map(is_label, features.values())):
                return find_column(features, None, is_label, "label")
        raise no_classes(features)
    if not _may_be_labels(features[find_column(features, name, is_text, "label")]):
        raise ValueError(
            f"the column {name} has no class labels; the columns are {_listing(features)}. For numbers in place of "
            "classes, set --task regression"
        )
    return name


def _may_be_labels(feature: Any) -> bool:
    return is_text(feature) or feature == datasets.Value("bool") or any(is_label(feature) for is_label in _LABELS)


def no_classes(features: Mapping[str, Any]) -> ValueError:
    """Return the error for images without labels."""
    return ValueError(
        f"the images have no classes (columns: {_listing(features)}); make a folder of images for each of two classes "
        "or more (FOLDER/CLASS/IMAGE), or name a column with --label-column"
    )


def _listing(features: Mapping[str, Any]) -> str:
    """Return the columns with their types."""
    return ", ".join(
        f"{name} ({feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__})"
        for name, feature in features.items()
    )
