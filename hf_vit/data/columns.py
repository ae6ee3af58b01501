"""Find the image column and the label column of a data set by their types."""

from collections.abc import Callable, Mapping
from typing import Any

import datasets


def is_image(feature: Any) -> bool:
    """Tell whether a column has images."""
    return isinstance(feature, datasets.Image)


def is_list_of(feature: Any, kind: type) -> bool:
    """Tell whether a column has lists of `kind`."""
    return isinstance(feature, datasets.List | datasets.LargeList) and isinstance(feature.feature, kind)


def find_column(
    features: Mapping[str, Any], name: str | None, fits: Callable[[Any], bool], what: str, option: str
) -> str:
    """Return the column called `name`; without a name, the only column that fits.

    Args:
        what: kind of the column, in the message.
        option: command-line option that names the column, in the message.

    Raises:
        ValueError: there is no such column, or not exactly one fits; the message lists the columns.
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
    """Return the column called `name`; by default that of class labels, else of lists of them, else of integers."""
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
    """Return the error for images without labels."""
    columns = ", ".join(f"{column} ({_describe_feature(feature)})" for column, feature in features.items())
    return ValueError(
        f"the images have no classes (columns: {columns}); make a folder of images for each of two classes or more "
        "(FOLDER/CLASS/IMAGE), or name a column with --label-column"
    )


def _describe_feature(feature) -> str:
    return feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__
