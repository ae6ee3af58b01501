"""The columns of images and of labels, found by their types."""

from collections.abc import Callable, Mapping
from typing import Any

import datasets


def is_image(feature: Any) -> bool:
    """Whether a column has images."""
    return isinstance(feature, datasets.Image)


def is_list_of(feature: Any, kind: type) -> bool:
    """Whether a column has lists of something."""
    return isinstance(feature, datasets.List | datasets.LargeList) and isinstance(feature.feature, kind)


def find_column(
    features: Mapping[str, Any], name: str | None, fits: Callable[[Any], bool], what: str, option: str
) -> str:
    """The column called `name`, or else the one column that fits.

    Args:
        what: the kind of column, and `option`, how to name one: for the message.

    Raises:
        ValueError: listing the columns, when there is no such column, or not exactly one that fits.
    """
    if name is not None:
        if name not in features:
            raise ValueError(f"there is no column {name!r}; the columns are {', '.join(features)}")
        return name
    found = [column for column, feature in features.items() if fits(feature)]
    if len(found) != 1:
        columns = ", ".join(f"{column} ({_describe_feature(feature)})" for column, feature in features.items())
        raise ValueError(
            f"{len(found) or 'no'} columns of type {what}; choose with {option}; the columns are {columns}"
        )
    return found[0]


def find_label_column(features: Mapping[str, Any], name: str | None) -> str:
    """The column called `name`, or else the one of class labels; else of lists of them; else of whole numbers."""
    kinds: tuple[Callable[[Any], bool], ...] = (
        lambda feature: isinstance(feature, datasets.ClassLabel),
        lambda feature: is_list_of(feature, datasets.ClassLabel),
        lambda feature: isinstance(feature, datasets.Value) and "int" in feature.dtype,
    )
    present = [kind for kind in kinds if any(map(kind, features.values()))]
    if name is None and not present:
        raise no_classes(features)
    return find_column(features, name, present[0] if present else kinds[0], "class label", "--label-column")


def no_classes(features: Mapping[str, Any]) -> ValueError:
    """The error for images without labels."""
    columns = ", ".join(f"{column} ({_describe_feature(feature)})" for column, feature in features.items())
    return ValueError(
        f"the images have no classes (columns: {columns}); make a folder of images for each of two classes or more "
        "(FOLDER/CLASS/IMAGE), or name a column with --label-column"
    )


def _describe_feature(feature) -> str:
    return feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__
