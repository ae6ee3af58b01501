"""Command line of the settings: a recipe, and one option for each field."""

import argparse
import dataclasses
import re
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from ..files.reading import parse_yaml
from .parser import OptionParser, SettingsError
from .reader import alternatives
from .recipes import build_settings

_Settings = TypeVar("_Settings")
_METAVARS = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT", dict[str, Any]: "TABLE"} | {
    list[int]: "INT,INT,...",
    list[float]: "FLOAT,FLOAT,...",
    list[str]: "TEXT,TEXT,...",
}


def parse_settings(settings_class: type[_Settings], argv: list[str] | None = None, program: str = "") -> _Settings:
    """Return the settings of `--recipe NAME`, `--select GROUP=LEVEL` and `--some-field VALUE`.

    An option overrides the recipe. Values on the command line are YAML too: `--freeze '[embeddings, layers.0]'`.

    Args:
        program: name of the program in usage lines; by default the script's name.

    Raises:
        SettingsError: a setting is unknown, of the wrong type, or contradicts another one.
        SystemExit: after --help.
    """
    names = [field.name for field in dataclasses.fields(settings_class)]  # pyright: ignore[reportArgumentType]
    parser = OptionParser(
        prog=program or None,
        usage=f"%(prog)s {'[MODEL] ' if 'model' in names else ''}[--recipe RECIPE] [--option VALUE ...]",
        description=settings_class.__doc__,
        argument_default=argparse.SUPPRESS,
    )
    add_options(parser, settings_class)
    arguments = vars(parser.parse_args(argv))
    if (model := arguments.pop("MODEL", None)) is not None:
        if "model" in arguments:
            raise SettingsError(f"the model is given twice: {model} and --model {arguments['model']}")
        arguments["model"] = model
    recipe, select = arguments.pop("recipe", None), arguments.pop("select", [])
    if select and not recipe:
        raise SettingsError(f"--select {' '.join(select)} needs --recipe, a recipe to choose from")
    if wrong := [item for item in select if "=" not in item]:
        raise SettingsError(f"--select takes GROUP=LEVEL, not {wrong[0]!r}")
    values = {name: _parse_text(text) for name, text in arguments.items()}
    try:
        return build_settings(settings_class, values, recipe, dict(item.split("=", 1) for item in select))
    except SettingsError as error:
        raise SettingsError(_as_options(str(error), arguments, settings_class)) from None


def add_options(parser: argparse.ArgumentParser, settings_class: Any) -> None:
    """Add an option for each field, with its heading, help and default; the model may also be a word by itself."""
    parser.add_argument(
        "--recipe", help="recipe to start from: a name (see `hf-vit recipes`), a YAML file or its address"
    )
    parser.add_argument("--select", nargs="+", metavar="GROUP=LEVEL", help="levels of the recipe's options")
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(settings_class):
        heading = field.metadata["group"]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        if field.name == "model":
            parser.add_argument("MODEL", nargs="?", help="the same as --model")
        bare: dict[str, Any] = {"nargs": "?", "const": "true"} if bool in alternatives(field.type) else {}
        about = f"{field.metadata['about']}{_default_of(field)}".replace("%", "%%")
        option = f"--{field.name.replace('_', '-')}"
        groups[heading].add_argument(option, dest=field.name, metavar=_metavar(field.type), help=about, **bare)


def _as_options(message: str, given: Iterable[str], settings_class: Any) -> str:
    """Write the settings in a message as options, where the command line gave one of them.

    A name without an underscore is also a word; it is the setting where its value follows.
    """
    names = [field.name for field in dataclasses.fields(settings_class)]
    plain, words = ("|".join(name for name in names if ("_" in name) is joined) for joined in (True, False))
    pattern = re.compile(rf"(?<![\w-])(?:(?:{plain})(?!\w)|(?<!the )(?:{words})(?= is | \())")
    if not {found[0] for found in pattern.finditer(message)} & set(given):
        return message
    return pattern.sub(lambda found: f"--{found[0].replace('_', '-')}", message)


def _metavar(kind: Any) -> str:
    """Placeholder for a value in the help: `int | None` -> "INT"; choices are listed."""
    return "|".join(
        "|".join(typing.get_args(option)) if typing.get_origin(option) is typing.Literal else _METAVARS[option]
        for option in alternatives(kind)
        if option is not type(None)
    )


def _default_of(field: Any) -> str:
    """Default value for the help; empty for None and empty lists, which the help text itself describes."""
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is None or value in ([], {}):
        return ""
    return f" (default: {str(value).lower() if isinstance(value, bool) else value})"


def _parse_text(text: str) -> Any:
    try:
        return parse_yaml(text, "the command line")
    except ValueError:
        return text
