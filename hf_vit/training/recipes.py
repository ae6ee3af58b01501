"""Recipes: YAML files that set fields of a settings class.

They lie beside the scripts and are installed with them. Three more keys shorten families of recipes:

* `base` names a recipe to start from, in the same folder or installed.
* `options` holds groups of named levels; each level is a set of fields.
* `select` chooses the level of each group, like `--select augmentation=strong1`. A level may itself `select` levels of
  other groups, which the command line overrides.

Two keys are documentation: `cites` names the original configurations that a recipe follows, and `differs` the fields
that differ from them, each with its reason. tests/training/test_recipe_audit.py compares both with the originals.
"""

import dataclasses
import math
import os
import types
import typing
from collections.abc import Iterable
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from ..files.download import fetch
from ..files.messages import did_you_mean, shorten
from ..files.reading import read_text, read_yaml

_Settings = TypeVar("_Settings")
_STRUCTURE = ("base", "options", "select", "cites", "differs")
_EXCLUSIVE = (("steps", "epochs"),)  # setting one of these unsets the other


class SettingsError(ValueError):
    """Error for a setting that is unknown, of the wrong type, or contradicts another one."""


class About(NamedTuple):
    """Comments at the beginning of a recipe."""

    what: str
    hardware: str
    expected: str


def installed_recipes() -> dict[str, Path]:
    """Return the files of the installed recipes by name."""
    folder = Path(str(resources.files("hf_vit.scripts"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str | os.PathLike) -> Path:
    """Return the file of a recipe.

    Args:
        name: a file, the address of a file to download, or the name of an installed recipe, such as "digits".

    Raises:
        SettingsError: the recipe does not exist.
        OSError: the download failed.
    """
    text = os.fspath(name)
    if "://" in text:
        return fetch(text, progress=False).path
    path, installed = Path(text).expanduser(), installed_recipes()
    if path.is_file():
        return path
    if path.name == text and path.stem in installed:
        return installed[path.stem]
    raise SettingsError(f"there is no recipe {text} (`hf-vit recipes` lists them){did_you_mean(text, installed)}")


def about_recipe(path: Path) -> About:
    """Read the comments at the beginning of a recipe, each as one line."""
    comments = takewhile(lambda line: line.startswith("#"), read_text(path).splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in comments)
    what, _, rest = text.partition(" Source: ")
    _, _, rest = rest.partition(" Hardware: ")
    hardware, _, expected = rest.partition(" Expect")
    return About(what, hardware, expected.lstrip(": ").removeprefix("ed: "))


def read_recipe(name: str | os.PathLike, select: dict[str, str] | None = None) -> dict[str, Any]:
    """Read the fields of a recipe, with its base and its selected options.

    Fields of a recipe override those of its base and of the base's options; its own options override its fields.

    Args:
        name: as in `find_recipe`.
        select: group -> level, overriding the recipe's own selection.

    Raises:
        SettingsError: the recipe does not exist or is malformed, or has no such group or level.
    """
    path = find_recipe(name)
    layers = _read_layers(path, ())
    selected = _select_levels(layers, select or {}, path)
    values: dict[str, Any] = {}
    for layer in layers:
        values = merge(values, _fields_of(layer))
        for group, levels in layer.get("options", {}).items():
            if group in selected:
                values = merge(values, _fields_of(_level_of(group, levels, selected[group], path)))
    return values


def _fields_of(layer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in layer.items() if name not in _STRUCTURE}


def _select_levels(layers: list[dict[str, Any]], select: dict[str, str], path: str | Path) -> dict[str, str]:
    """Level of each group: that of `select`, else that of another selected level, else the recipe's default."""
    defaults = {group: level for layer in layers for group, level in layer.get("select", {}).items()}
    selected, implied = defaults | select, {}
    groups = {group for layer in layers for group in layer.get("options", {})}
    if unknown := sorted(selected.keys() - groups):
        raise SettingsError(f"{path} has no option group {shorten(unknown[0])}; it has {_listing(sorted(groups))}")
    for layer in layers:
        for group, levels in layer.get("options", {}).items():
            if group in selected:
                implied |= _level_of(group, levels, selected[group], path).get("select", {})
    return {group: str(level) for group, level in (defaults | implied | select).items()}


def _level_of(group: str, levels: dict, level: Any, path: str | Path) -> dict[str, Any]:
    by_name = {str(name): fields for name, fields in levels.items()}
    if str(level) not in by_name:
        raise SettingsError(f"{group} in {path} has no level {shorten(level)}; it has {_listing(by_name)}")
    return by_name[str(level)]


def _read_layers(path: Path, above: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Read a recipe and its bases, the lowest base first.

    Args:
        above: the recipes that have this one as their base.
    """
    if path.resolve() in above:
        raise SettingsError(f"{path} is its own base, through {' and '.join(recipe.name for recipe in above)}")
    try:
        layer = read_yaml(path) or {}
    except ValueError as error:
        raise SettingsError(str(error)) from None
    _check_structure(layer, path)
    if "base" not in layer:
        return [layer]
    beside = path.parent / layer["base"]
    base = beside if beside.is_file() else find_recipe(layer["base"])
    return [*_read_layers(base, (*above, path.resolve())), layer]


def _check_structure(layer: Any, path: Path) -> None:
    """Check the types of a recipe's keys, `base`, `options` and `select`.

    Raises:
        SettingsError: the first entry of a wrong type.
    """
    if not isinstance(layer, dict):
        raise SettingsError(f"{path} holds a {type(layer).__name__} (expected settings with values)")
    if odd := [name for name in layer if not isinstance(name, str)]:
        raise SettingsError(f"{path} has a setting called {shorten(odd[0])} (expected a text as its name)")
    if not isinstance(layer.get("base", ""), str):
        raise SettingsError(f"base in {path} is {shorten(layer['base'])}; it must be the name of a recipe")
    _check_selection(layer, str(path))
    groups = layer.get("options", {})
    if not isinstance(groups, dict) or not all(isinstance(levels, dict) for levels in groups.values()):
        raise SettingsError(f"options in {path} are {shorten(groups)}; they must be groups of levels")
    for group, levels in groups.items():
        for level, fields in levels.items():
            place = f"level {shorten(level)} of {shorten(group)} in {path}"
            if not isinstance(group, str) or not isinstance(fields, dict):
                raise SettingsError(f"{place} is {shorten(fields)}; it must be settings with values")
            if odd := [name for name in fields if not isinstance(name, str)]:
                raise SettingsError(f"{place} has a setting called {shorten(odd[0])} (expected a text as its name)")
            _check_selection(fields, place)


def _check_selection(fields: dict[str, Any], place: str) -> None:
    select = fields.get("select", {})
    if not isinstance(select, dict) or not all(
        isinstance(group, str) and isinstance(level, str | int | float) for group, level in select.items()
    ):
        raise SettingsError(f"select in {place} is {shorten(select)}; it must be groups, each with the name of a level")


def merge(values: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Override `values` by `later`; tables, such as `config`, are merged field by field."""
    for pair in _EXCLUSIVE:
        if any(later.get(name) is not None for name in pair):
            values = {name: value for name, value in values.items() if name not in pair}
    tables = [name for name, value in later.items() if isinstance(value, dict) and isinstance(values.get(name), dict)]
    return {**values, **later, **{name: {**values[name], **later[name]} for name in tables}}


def build_settings(
    settings_class: type[_Settings], values: dict[str, Any], recipe: str | os.PathLike | None = None
) -> _Settings:
    """Build settings from Python values, which override those of a recipe; the errors are those of `build`."""
    return build(settings_class, merge(read_recipe(recipe) if recipe else {}, values))


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
            return value
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
    return str(kind) if typing.get_args(kind) else kind.__name__


def _listing(names: Iterable[str]) -> str:
    return ", ".join(shorten(str(name)).strip("'") for name in list(names)[:50]) or "none"


def show(settings: Any) -> dict[str, Any]:
    """Print the resolved settings as a recipe; return no metrics."""
    print(dump(settings), end="")
    return {}


def dump(settings: Any) -> str:
    """Return the resolved settings as the text of a recipe."""
    hidden = {"print_config", "resume", "overwrite"}
    values = {name: value for name, value in dataclasses.asdict(settings).items() if name not in hidden}
    return yaml.safe_dump(values, sort_keys=False)
