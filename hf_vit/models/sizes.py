"""Sizes and their limits, fields of configurations that are checked, and names of arguments."""

import difflib
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Size = int | list[int] | tuple[int, int]
Grid = tuple[int, int]  # (rows, columns) of patches
Config = TypeVar("Config", bound=type)

# Upper limits. For comparison: ViT-G/14, the largest of the family, has 48 layers and 1,664 channels; an image of
# 8,000 x 6,000 pixels has 187,500 patches of 16; ImageNet-21k has 21,843 classes.
MAX_LAYERS = 1_000
MAX_WIDTH = 2**17  # channels anywhere
MAX_STAGES = 8  # of a ResNet
MAX_LABELS = 2**18
MAX_PIXELS = 2**28  # of an image
MAX_TOKENS = 2**20  # patches of an image
_SIZE = f"an int or (height, width), at least 1 and at most {MAX_PIXELS:,} in area"

# Removed arguments of the models' methods, and what replaces them: rows of the table of files/removed_names.py.
REMOVED_ARGUMENTS = {
    "forward(kept_patches)": "use keep, which has the same meaning",
    "from_pretrained(verify)": "hf-vit verify FOLDER hashes all files again",
}


def as_pair(size: Size | tuple[int, ...]) -> tuple[int, int]:
    """Return a size as (height, width): `224` -> `(224, 224)`; `[224, 320]` -> `(224, 320)`."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def is_same_grid(grid: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two grids are equal; False for symbolic sizes, which stand for any size in an export."""
    return all(isinstance(size, int) for size in (*grid, *other)) and tuple(grid) == tuple(other)


def check_size(name: str, size: Any) -> None:
    """Raise ValueError unless a size is an int or (height, width), at least 1 and at most `MAX_PIXELS` in area."""
    if not _is_size(size):
        raise ValueError(f"{name} is {reprlib.repr(size)}; expected {_SIZE}")


def _is_size(size: Any) -> bool:
    sides = (size, size) if isinstance(size, int) else size
    is_pair = isinstance(sides, list | tuple) and len(sides) == 2 and all(isinstance(side, int) for side in sides)
    return is_pair and min(sides) >= 1 and sides[0] * sides[1] <= MAX_PIXELS


# Fields of configurations. None is valid if the field's type allows it.


def int_field(default: int | None, highest: int) -> Any:
    """Declare an int field with values from 1 to `highest`."""
    return _limited(default, lambda value: 1 <= value <= highest, f"1 to {highest:,}")


def float_field(default: float, below: float = math.inf) -> Any:
    """Declare a float field with values of at least 0 and less than `below`."""
    return _limited(default, lambda value: 0 <= value < below, f"at least 0 and less than {below}")


def size_field(default: Size | None) -> Any:
    """Declare a field for a size: an int or (height, width)."""
    return _limited(default, _is_size, _SIZE)


def stages_field(default: tuple[int, ...]) -> Any:
    """Declare a field for the number of units in each stage of a ResNet."""

    def are_valid(depths: Any) -> bool:
        return len(depths) <= MAX_STAGES and min(depths, default=1) >= 1 and sum(depths) <= MAX_LAYERS

    return _limited(default, are_valid, f"at most {MAX_STAGES} stages and {MAX_LAYERS:,} units, 1 or more in each")


def _limited(default: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
    from huggingface_hub.dataclasses import validated_field  # only where a configuration is declared

    def check(value: Any) -> None:
        if value is not None and not is_valid(value):
            raise ValueError(f"{reprlib.repr(value)} (expected {expected})")

    return validated_field(check, default=default)


def strict(config_class: Config) -> Config:
    """Apply huggingface_hub's `@strict`; its errors become ValueErrors."""
    from huggingface_hub.dataclasses import strict as hub_strict

    checked: Any = hub_strict(config_class)
    checked.__init__ = value_errors()(checked.__init__)
    checked.__setattr__ = value_errors()(checked.__setattr__)
    return checked


@contextmanager
def value_errors() -> Iterator[None]:
    """Convert the errors of huggingface_hub's validation to ValueErrors of one line."""
    from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassError

    try:
        yield
    except StrictDataclassClassValidationError as error:  # of `validate_architecture`
        raise ValueError(str(error.__cause__)) from error
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error)[:1000].split())) from error


# Names of arguments.


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?" with the most similar known name, or "" if none is similar."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def check_choice(what: str, choice: str, known: Collection[str]) -> None:
    """Raise ValueError if `choice` is not a known name; the message lists the known names."""
    if choice not in known:
        raise ValueError(f"unknown {what} {choice!r}{did_you_mean(str(choice), known)}; known: {', '.join(known)}")


def check_arguments(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError for the first argument that is unknown."""
    for name in names:
        if name not in known:
            raise ValueError(f"{what} has no argument {name}{did_you_mean(name, known)}")


def check_removed_arguments(method: str, names: Iterable[str]) -> None:
    """Raise ValueError if an argument of a method of the models was removed."""
    for name in names:
        call = f"{method}({name})"
        if call in REMOVED_ARGUMENTS:
            raise ValueError(f"{call} was removed: {REMOVED_ARGUMENTS[call]}")
