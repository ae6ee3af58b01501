"""Settings on the command line: a recipe, and one option for each field."""

import argparse
import dataclasses
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ..files.reading import parse_yaml
from .parser import OptionParser
from .recipes import alternatives, build_settings

_Settings = TypeVar("_Settings")
_METAVARS = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT", dict[str, Any]: "TABLE"} | {
    list[int]: "INT,INT,...",
    list[float]: "FLOAT,FLOAT,...",
    list[str]: "TEXT,TEXT,...",
}


def parse_settings(
    settings_class: type[_Settings],
    argv: list[str] | None = None,
    program: str = "",
    plan: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> _Settings:
    """Return the settings of `--recipe NAME`, `--select GROUP=LEVEL` and `--some-field VALUE`.

    An option overrides the recipe. Values on the command line are YAML too: `--freeze '[embeddings, layers.0]'`.

    Args:
        program: name of the program in usage lines; by default the script's name.
        plan: as in `build_settings`.

    Raises:
        ValueError: a setting is unknown, of the wrong type, or contradicts another one.
        SystemExit: after --help.
    """
    model = "[MODEL] " if "model" in typing.get_type_hints(settings_class) else ""
    parser = OptionParser(
        prog=program or None,
        usage=f"%(prog)s {model}[--recipe RECIPE] [--option VALUE ...]",
        description=settings_class.__doc__,
        argument_default=argparse.SUPPRESS,
    )
    add_options(parser, settings_class)
    arguments = vars(parser.parse_args(argv))
    if (given := arguments.pop("MODEL", None)) is not None and arguments.setdefault("model", given) != given:
        raise ValueError(f"the model is given twice: {given} and --model {arguments['model']}")
    recipe, select = arguments.pop("recipe", None), arguments.pop("select", [])
    if select and (not recipe or not all("=" in item for item in select)):
        raise ValueError(f"--select {' '.join(select)} must be GROUP=LEVEL of a --recipe")
    kinds = {field.name: alternatives(field.type) for field in dataclasses.fields(settings_class)}  # pyright: ignore[reportArgumentType]
    for name, text in arguments.items():
        with suppress(ValueError):  # text that is no YAML stays as it is
            value = parse_yaml(text, "the command line")
            if str not in kinds[name] or isinstance(value, str | None):  # a folder called 2026_11_26 is no number
                arguments[name] = value
    return build_settings(settings_class, arguments, recipe, dict(item.split("=", 1) for item in select), plan)


def add_options(parser: argparse.ArgumentParser, settings_class: Any) -> None:
    """Add an option for each field, with its heading, help and default; the model may also be a word by itself."""
    parser.add_argument("--recipe", help="recipe to start from: a name (see `hf-vit recipes`), a YAML file or its URL")
    select = "levels of the recipe's options, such as positions=relative for small (`hf-vit recipes show NAME`)"
    parser.add_argument("--select", nargs="+", metavar="GROUP=LEVEL", help=select)
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(settings_class):
        heading = field.metadata["group"]
        groups[heading] = groups.get(heading) or parser.add_argument_group(heading)
        if field.name == "model":
            parser.add_argument("MODEL", nargs="?", help="model, as an alternative to --model")
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        about = field.metadata["about"]
        if default not in (None, [], {}):  # otherwise the text describes it
            about += f" (default: {str(default).lower() if isinstance(default, bool) else default})"
        kinds = [kind for kind in alternatives(field.type) if kind is not type(None)]
        more: dict[str, Any] = {"nargs": "?", "const": "true"} if bool in kinds else {}
        groups[heading].add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=field.name,
            metavar="|".join(_METAVARS.get(kind) or "|".join(typing.get_args(kind)) for kind in kinds),
            help=about.replace("%", "%%"),
            **more,
        )
