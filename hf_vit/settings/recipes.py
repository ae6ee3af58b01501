"""Settings from values of Python, the command line or recipes, with checks of their names and types.

Recipes are YAML files that set fields of a settings class. They are installed with the scripts. Three more keys shorten
families of recipes:

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
import re
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..files.messages import did_you_mean, shorten
from ..files.output import check_results_folder, refuse_inputs
from ..files.reading import read_text, read_yaml
from ..files.removed_names import check_removed, drop_removed_settings
from .fields import AUTO, TrainingSettings, fields_with, paths_of

_Settings = TypeVar("_Settings")
_SIZE = re.compile(r"\d+x\d+")  # 384x512, as in `hf-vit predict --image-size`
_STRUCTURE = {  # keys of a recipe that are not settings
    "base": str,
    "options": dict[str, dict[str, dict[str, Any]]],
    "select": dict[str, str],
    "cites": Any,
    "differs": Any,
}


def build(settings_class: type[_Settings], values: dict[str, Any]) -> _Settings:
    """Build settings from values, converted to the types of their fields, and validate them.

    Raises:
        ValueError: a setting is unknown, of the wrong type, or contradicts another one.
    """
    fields = {field.name: field.type for field in dataclasses.fields(settings_class)}  # pyright: ignore[reportArgumentType]
    for name in values:
        check_removed("setting", str(name))
    if unknown := sorted(values.keys() - fields.keys()):
        hint = did_you_mean(str(unknown[0]), fields)
        raise ValueError(f"{settings_class.__name__} has no setting called {str(unknown[0])[:100]}{hint}")
    settings = settings_class(**{name: convert(name, value, fields[name]) for name, value in values.items()})
    settings.validate()  # pyright: ignore[reportAttributeAccessIssue]
    return settings


def convert(name: str, value: Any, kind: Any) -> Any:
    """Convert `value` to `kind`, a type or a union; text may be a number, because YAML 1.1 reads 1e-3 as text.

    Raises:
        ValueError: no type of `kind` fits.
    """
    for option in sorted(alternatives(kind), key=lambda option: option is not type(None)):  # None before text
        with suppress(TypeError, ValueError, OverflowError):
            return _convert_to(value, option)
    expected = " or ".join(map(_describe, alternatives(kind)))
    raise ValueError(f"{name} is {shorten(value)}; it must be {expected}")


def _convert_to(value: Any, kind: Any) -> Any:
    """Convert `value` to one type; raise TypeError or ValueError if it does not fit."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is typing.Literal:
        return _to_choice(value, arguments)
    if origin is list:
        return [_convert_to(item, arguments[0]) for item in _to_items(value)]
    if origin is dict:
        return _to_table(value, *arguments)
    return _CONVERTERS[kind](value)


def _to_choice(value: Any, choices: tuple[str, ...]) -> str:
    if isinstance(value, bool):
        value = "yes" if value else "no"  # YAML 1.1 reads `no` as False
    if value not in choices:
        raise ValueError
    return value


def _to_items(value: Any) -> list | tuple:
    """Return the items of a list, of a text such as 0.05,1 or 384x512, or of one value."""
    if isinstance(value, str):
        separator = "x" if _SIZE.fullmatch(value) else ","
        return [item.strip() for item in value.split(separator)]
    return value if isinstance(value, list | tuple) else [value]


def _to_table(value: Any, key_kind: Any, item_kind: Any) -> dict:
    if not isinstance(value, dict):
        raise TypeError
    return {_convert_to(key, key_kind): _convert_to(item, item_kind) for key, item in value.items()}


def _to_none(value: Any) -> None:
    if value not in (None, "none"):
        raise ValueError


def _to_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _to_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float | os.PathLike):
        raise TypeError
    return str(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError
    return float(value)


def _to_int(value: Any) -> int:
    if _to_float(value) % 1:
        raise ValueError
    return int(value)


_CONVERTERS: dict[Any, Callable[[Any], Any]] = {
    Any: lambda value: value,
    type(None): _to_none,
    bool: _to_bool,
    str: _to_text,
    float: _to_float,
    int: _to_int,
}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, of either class (`int | None` and `Literal[...] | None` differ); else the type."""
    return typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)


def _describe(kind: Any) -> str:
    """Describe a type that is not a union."""
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(typing.get_args(kind))
    if typing.get_origin(kind) is dict:
        return "a table"
    if kind is type(None):
        return "none"
    return str(kind) if typing.get_args(kind) else kind.__name__


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
    values = {name: getattr(settings, name) for name in fields_with("in_recipe", settings)}
    return yaml.safe_dump(values, sort_keys=False)


def installed_recipes() -> dict[str, Path]:
    """Return the files of the installed recipes by name."""
    folder = Path(str(resources.files("hf_vit.scripts"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_recipe(name: str | os.PathLike) -> Path:
    """Return the file of a recipe.

    Args:
        name: a file, the URL of a file to download, or the name of an installed recipe, such as "digits".

    Raises:
        ValueError: the recipe does not exist.
        OSError: the download failed.
    """
    text = os.fspath(name)
    if "://" in text:
        from ..files.download import fetch  # imports huggingface_hub

        return fetch(text, progress=False).path
    path, installed = Path(text).expanduser(), installed_recipes()
    if path.is_file():
        return path
    if path.name == text and path.stem in installed:
        return installed[path.stem]
    check_removed("recipe", path.stem)
    raise ValueError(f"there is no recipe {text} (`hf-vit recipes` lists them){did_you_mean(text, installed)}")


def about_recipe(path: Path) -> tuple[str, str, str]:
    """Return what a recipe is, its hardware and its expected results, from the comments at its beginning."""
    comments = takewhile(lambda line: line.startswith("#"), read_text(path).splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in comments)
    what, _, rest = text.partition(" Source: ")
    _, _, rest = rest.partition(" Hardware: ")
    hardware, _, expected = rest.partition(" Expect")
    return what, hardware, expected.lstrip(": ").removeprefix("ed: ")


def read_recipe(name: str | os.PathLike, select: dict[str, str] | None = None) -> dict[str, Any]:
    """Read the fields of a recipe, with its base and its selected options.

    Fields of a recipe override those of its base and of the base's options; its own options override its fields.

    Args:
        name: as in `find_recipe`.
        select: group -> level, overriding the recipe's own selection.

    Raises:
        ValueError: the recipe does not exist or is malformed, or has no such group or level.
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
    return drop_removed_settings({name: value for name, value in layer.items() if name not in _STRUCTURE})


def _select_levels(layers: list[dict[str, Any]], select: dict[str, str], path: Path) -> dict[str, str]:
    """Level of each group: that of `select`, else that of another selected level, else the recipe's default."""
    defaults = {group: level for layer in layers for group, level in layer.get("select", {}).items()}
    selected, implied = defaults | select, {}
    groups = {group for layer in layers for group in layer.get("options", {})}
    if unknown := sorted(selected.keys() - groups):
        raise ValueError(f"{path} has no option group {shorten(unknown[0])}; it has {shorten(sorted(groups))}")
    for layer in layers:
        for group, levels in layer.get("options", {}).items():
            if group in selected:
                chosen = _level_of(group, levels, selected[group], path).get("select", {})
                implied |= convert(f"select in {group} of {path}", chosen, _STRUCTURE["select"])
    return defaults | implied | select


def _level_of(group: str, levels: dict[str, Any], level: str, path: Path) -> dict[str, Any]:
    if level not in levels:
        raise ValueError(f"{group} in {path} has no level {shorten(level)}; it has {shorten(list(levels))}")
    return levels[level]


def _read_layers(path: Path, above: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Read a recipe and its bases, the lowest base first.

    Args:
        above: the recipes that have this one as their base.
    """
    if path.resolve() in above:
        raise ValueError(f"{path} is its own base, through {' and '.join(recipe.name for recipe in above)}")
    layer = convert(f"the recipe {path}", read_yaml(path) or {}, dict[str, Any])
    for name in _STRUCTURE.keys() & layer.keys():
        layer[name] = convert(f"{name} in {path}", layer[name], _STRUCTURE[name])
    if "base" not in layer:
        return [layer]
    neighbor = path.parent / layer["base"]
    base = neighbor if neighbor.is_file() else find_recipe(layer["base"])
    return [*_read_layers(base, (*above, path.resolve())), layer]


def build_settings(
    settings_class: type[_Settings],
    values: dict[str, Any],
    recipe: str | os.PathLike | None = None,
    select: dict[str, str] | None = None,
    plan: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> _Settings:
    """Build settings from values, which override those of a recipe; for errors see `read_recipe` and `build`.

    A ValueError is also raised if `output_dir` would replace what the settings say to read.

    Args:
        plan: function that returns the fields of the recipe "auto" for these values; None: those of auto.yaml. With it,
            "auto" is the default for values without a length.
    """
    if select and not recipe:
        raise ValueError(f"select is {shorten(select)}, which needs a recipe")
    needs_length = not any(values.get(name) for name in ("steps", "epochs", "closed_form", "add", "remove"))
    if plan is not None and (recipe == AUTO or (recipe is None and needs_length)):
        defaults = plan(values)
    elif recipe:
        defaults = read_recipe(recipe, select)
    else:
        defaults = {}
    settings = build(settings_class, merge(defaults, values))
    _check_output(settings, recipe)
    return settings


def _check_output(settings: Any, recipe: str | os.PathLike | None) -> None:
    """Raise ValueError if `output_dir` is or contains something that the settings say to read."""
    output = settings.output_dir
    if not output or settings.print_config:
        return
    if not isinstance(settings, TrainingSettings):
        check_results_folder(output, *paths_of(settings))
    elif settings.resume:  # nothing is deleted, but the models would be replaced
        refuse_inputs(output, getattr(settings, "model", None), settings.teacher)
    else:
        refuse_inputs(output, *paths_of(settings))
        if settings.overwrite and recipe and os.path.isfile(recipe):
            refuse_inputs(output, recipe)
