"""Values that are inferred from a checkpoint, each with its reason."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple


class Inferred(NamedTuple):
    """A value inferred from a checkpoint.

    value: the value.
    because: the reason, with numbers.
    is_assumed: the checkpoint does not show the value, so it may be wrong.
    """

    value: Any
    because: str
    is_assumed: bool = False


Fields = dict[str, Inferred]
_FOLLOWING = ("image_size", "position_interpolation")  # these change if the caller states another patch size


def all_because(values: Mapping[str, Any], because: str, is_assumed: bool = False) -> Fields:
    """Make fields that share one reason."""
    return {name: Inferred(value, because, is_assumed) for name, value in values.items()}


def values_of(fields: Mapping[str, Inferred]) -> dict[str, Any]:
    """Return the fields without their reasons."""
    return {name: inferred.value for name, inferred in fields.items()}


def by(sizes: Iterable[int]) -> str:
    """Format sizes as text: `16 x 16 x 3 x 768`."""
    return " x ".join(map(str, sizes))


def length_of(name: str, shapes: Mapping[str, tuple[int, ...]], axis: int) -> Inferred:
    """Infer a number from the length of an array's axis; None without the array."""
    if name not in shapes:
        return Inferred(None, f"there is no {name}")
    return Inferred(shapes[name][axis], f"{name} is {by(shapes[name])}")


def has_array(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Inferred:
    """Infer True if an array of this name exists, else False."""
    return Inferred(name in shapes, f"there is {'an array' if name in shapes else 'no'} {name}")


def as_configured(fields: Fields, config: Any, stated: Collection[str]) -> Fields:
    """Return the fields with the values of a configuration in which the caller has changed some.

    If the caller states another image size, the shape of the grid of positions stays an assumption.

    Args:
        fields: the inferred fields.
        config: the configuration.
        stated: names of the fields that the caller states.
    """
    has_table = getattr(config, "position_embedding_type", "none") not in ("sincos2d", "none")
    found = {}
    for name in dict.fromkeys((*fields, *sorted(stated))):
        before = fields.get(name, Inferred(None, "stated"))
        value = getattr(config, name, before.value)
        is_stated = name in stated
        if not is_stated and (value == before.value or name not in _FOLLOWING or "patch_size" not in stated):
            found[name] = before._replace(value=value)
            continue
        found[name] = Inferred(value, "stated" if is_stated else "follows from the stated patch size")
        if name == "image_size" and before.is_assumed and has_table and "position_grid" not in fields:
            grid = getattr(config, "position_grid", None) or "square"
            found["position_grid"] = Inferred(grid, before.because, is_assumed=True)
    return found


def assumed_of(fields: Fields) -> list[str]:
    """List the assumptions, one sentence each, for `conversion.json`."""
    assumed = {name: inferred for name, inferred in fields.items() if inferred.is_assumed}
    return [f"{name} {as_text(inferred.value)}: {inferred.because}" for name, inferred in assumed.items()]


def as_text(value: Any) -> str:
    """Format a value as text: sizes as `20 x 36`."""
    if isinstance(value, tuple):
        return by(value)
    return "none" if value is None else str(value)
