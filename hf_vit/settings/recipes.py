"""Recipes: YAML files that set fields of a settings class.

They are installed with the scripts. Three more keys shorten families of recipes:

* `base` names a recipe to start from, in the same folder or installed.
* `options` holds groups of named levels; each level is a set of fields.
* `select` chooses the level of each group, like `--select augmentation=strong1`. A level may itself `select` levels of
  other groups, which the command line overrides.

Two keys are documentation: `cites` names the original configurations that a recipe follows, and `differs` the fields
that differ from them, each with its reason. tests/training/test_recipe_audit.py compares both with the originals.
"""

import os
from collections.abc import Callable
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..files.download import fetch
from ..files.messages import did_you_mean, shorten
from ..files.reading import read_text, read_yaml
from .fields import AUTO
from .reader import SettingsError, build, convert, merge

_Settings = TypeVar("_Settings")

_STRUCTURE = {  # keys of a recipe that are not settings
    "base": str,
    "options": dict[str, dict[str, dict[str, Any]]],
    "select": dict[str, str],
    "cites": Any,
    "differs": Any,
}


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
        name: a file, the URL of a file to download, or the name of an installed recipe, such as "digits".

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


def _select_levels(layers: list[dict[str, Any]], select: dict[str, str], path: Path) -> dict[str, str]:
    """Level of each group: that of `select`, else that of another selected level, else the recipe's default."""
    defaults = {group: level for layer in layers for group, level in layer.get("select", {}).items()}
    selected, implied = defaults | select, {}
    groups = {group for layer in layers for group in layer.get("options", {})}
    if unknown := sorted(selected.keys() - groups):
        raise SettingsError(f"{path} has no option group {shorten(unknown[0])}; it has {shorten(sorted(groups))}")
    for layer in layers:
        for group, levels in layer.get("options", {}).items():
            if group in selected:
                implied |= _level_of(group, levels, selected[group], path).get("select", {})
    return defaults | implied | select


def _level_of(group: str, levels: dict[str, Any], level: str, path: Path) -> dict[str, Any]:
    if level not in levels:
        raise SettingsError(f"{group} in {path} has no level {shorten(level)}; it has {shorten(list(levels))}")
    return levels[level]


def _read_layers(path: Path, above: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Read a recipe and its bases, the lowest base first.

    Args:
        above: the recipes that have this one as their base.
    """
    if path.resolve() in above:
        raise SettingsError(f"{path} is its own base, through {' and '.join(recipe.name for recipe in above)}")
    try:
        layer = convert(f"the recipe {path}", read_yaml(path) or {}, dict[str, Any])
    except ValueError as error:
        raise SettingsError(str(error)) from None
    for name in _STRUCTURE.keys() & layer.keys():
        layer[name] = convert(f"{name} in {path}", layer[name], _STRUCTURE[name])
    for group, levels in layer.get("options", {}).items():
        for fields in levels.values():
            if "select" in fields:
                name = f"select in {shorten(group)} of {path}"
                fields["select"] = convert(name, fields["select"], _STRUCTURE["select"])
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

    Args:
        plan: function that returns the fields of the recipe "auto" for these values; None: those of auto.yaml.
    """
    if plan is not None and recipe == AUTO:
        return build(settings_class, merge(plan(values), values))
    return build(settings_class, merge(read_recipe(recipe, select) if recipe else {}, values))
