"""The reader of settings: it checks the names and types of values from YAML, the command line and Python."""

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar

import yaml

from ..files.messages import did_you_mean, shorten
from .parser import SettingsError as SettingsError

_Settings = TypeVar("_Settings")
_EXCLUSIVE = (("steps", "epochs"),)  # setting one of these unsets the other


def build(settings_class: type[_Settings], values: dict[str, Any]) -> _Settings:
    """Build settings from values, converted to the types of their fields, and validate them.

    Raises:
        SettingsError: a setting is unknown, of the wrong type, or contradicts another one.
    """
    fields = {field.name: field.type for field in dataclasses.fields(settings_class)}  # pyright: ignore[reportArgumentType]
    if unknown := sorted(values.keys() - fields.keys()):
        listed = ", ".join(shorten(name).strip("'") for name in unknown[:10])
        hint = did_you_mean(str(unknown[0]), fields)
        raise SettingsError(f"{settings_class.__name__} has no setting called {listed}{hint}")
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
        try:
            return _convert_to(value, option)
        except (TypeError, ValueError, OverflowError):
            continue
    raise SettingsError(f"{name} is {shorten(value)}; it must be {_describe(kind)}")


def _convert_to(value: Any, kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if kind is typing.Any:
        return value
    if kind is type(None):
        if value is None or value == "none":
            return None
    elif origin is typing.Literal:
        text = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value  # YAML reads no
        if text in typing.get_args(kind):
            return text
    elif origin is list:
        items = (
            [item.strip() for item in value.split(",")]
            if isinstance(value, str)
            else [value]
            if isinstance(value, int | float)
            else value
        )
        if isinstance(items, list | tuple):
            return [_convert_to(item, typing.get_args(kind)[0]) for item in items]
    elif origin is dict:
        if isinstance(value, dict):
            of_keys, of_values = typing.get_args(kind)
            return {_convert_to(key, of_keys): _convert_to(item, of_values) for key, item in value.items()}
    elif kind is bool:
        if isinstance(value, bool):
            return value
    elif kind is str:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
    elif not isinstance(value, bool) and kind(value) == float(value) and math.isfinite(float(value)):  # int or float
        return kind(value)
    raise TypeError


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, of either class (`int | None` and `Literal[...] | None` differ); else the type."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _describe(kind: Any) -> str:
    """`int | None` -> "int or none"."""
    if len(alternatives(kind)) > 1:
        return " or ".join(_describe(option) for option in alternatives(kind))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(typing.get_args(kind))
    if kind is type(None):
        return "none"
    if typing.get_origin(kind) is dict:
        of_values = _describe(typing.get_args(kind)[1])
        return "a table" + (f" of tables{of_values.removeprefix('a table')}" if of_values.startswith("a table") else "")
    return str(kind) if typing.get_args(kind) else kind.__name__


def merge(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Override `values` by `later`; tables, such as `config`, are merged field by field."""
    for pair in _EXCLUSIVE:
        if any(later.get(name) is not None for name in pair):
            values = {name: value for name, value in values.items() if name not in pair}
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
