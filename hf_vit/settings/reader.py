"""Settings from values of YAML, the command line or Python, with checks of their names and types."""

import dataclasses
import math
import os
import types
import typing
from contextlib import suppress
from typing import Any, TypeVar

import yaml

from ..files.messages import did_you_mean, shorten

_Settings = TypeVar("_Settings")


class SettingsError(ValueError):
    """Error for a setting that is unknown, of the wrong type, or contradicts another one."""


def build(settings_class: type[_Settings], values: dict[str, Any]) -> _Settings:
    """Build settings from values, converted to the types of their fields, and validate them.

    Raises:
        SettingsError: a setting is unknown, of the wrong type, or contradicts another one.
    """
    fields = {field.name: field.type for field in dataclasses.fields(settings_class)}  # pyright: ignore[reportArgumentType]
    if unknown := sorted(values.keys() - fields.keys()):
        hint = did_you_mean(str(unknown[0]), fields)
        raise SettingsError(f"{settings_class.__name__} has no setting called {str(unknown[0])[:100]}{hint}")
    settings = settings_class(**{name: convert(name, value, fields[name]) for name, value in values.items()})
    try:
        settings.validate()  # pyright: ignore[reportAttributeAccessIssue]
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return settings


def convert(name: str, value: Any, kind: Any) -> Any:
    """Convert `value` to `kind`, a type or a union; text may be a number, because YAML 1.1 reads 1e-3 as text.

    Raises:
        SettingsError: no type of `kind` fits.
    """
    for option in sorted(alternatives(kind), key=lambda option: option is not type(None)):  # None before text
        with suppress(TypeError, ValueError, OverflowError):
            return _convert_to(value, option)
    expected = " or ".join(map(_describe, alternatives(kind)))
    raise SettingsError(f"{name} is {shorten(value)}; it must be {expected}")


def _convert_to(value: Any, kind: Any) -> Any:
    """Convert `value` to one type; raise TypeError or ValueError if it does not fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (kind is bool and isinstance(value, bool)):
        return value
    if kind is type(None) and value in (None, "none"):
        return None
    if origin is typing.Literal:
        text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value  # YAML 1.1 reads `no` as False
        if text in arguments:
            return text
    elif origin is list:
        items = [item.strip() for item in value.split(",")] if isinstance(value, str) else value
        items = items if isinstance(items, list | tuple) else [items]
        return [_convert_to(item, arguments[0]) for item in items]
    elif origin is dict and isinstance(value, dict):
        return {_convert_to(key, arguments[0]): _convert_to(item, arguments[1]) for key, item in value.items()}
    elif kind is str and isinstance(value, str | int | float | os.PathLike) and not isinstance(value, bool):
        return str(value)
    elif kind in (int, float) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and kind(value) == number:
            return kind(value)
    raise TypeError


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, of either class (`int | None` and `Literal[...] | None` differ); else the type."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _describe(kind: Any) -> str:
    """Describe a type that is not a union."""
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(typing.get_args(kind))
    if typing.get_origin(kind) is dict:
        return "a table"
    return "none" if kind is type(None) else str(kind) if typing.get_args(kind) else kind.__name__


def merge(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Override `values` by `later`; tables, such as `config`, are merged field by field."""
    if any(later.get(name) is not None for name in ("steps", "epochs")):  # each unsets the other
        values = {name: value for name, value in values.items() if name not in ("steps", "epochs")}
    tables = [name for name, value in later.items() if isinstance(value, dict) and isinstance(values.get(name), dict)]
    return {**values, **later, **{name: {**values[name], **later[name]} for name in tables}}


def show(settings: Any) -> dict[str, Any]:
    """Print the resolved settings as a recipe; return no metrics."""
    print(dump(settings), end="")
    return {}


def dump(settings: Any) -> str:
    """Return the resolved settings as the text of a recipe."""
    hidden = {"print_config", "resume", "overwrite"}
    values = {name: value for name, value in dataclasses.asdict(settings).items() if name not in hidden}
    return yaml.safe_dump(values, sort_keys=False)
