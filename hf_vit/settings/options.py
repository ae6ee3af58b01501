"""Settings on the command line: a recipe, and one option for each field."""

import argparse
import dataclasses
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from ..files.reading import parse_yaml
from .fields import HubOptions
from .parser import OptionParser, check_order
from .recipes import alternatives, build, build_settings

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
    """Return the settings of `MODEL DATA OUTPUT`, `--recipe NAME`, `--select GROUP=LEVEL` and `--some-field VALUE`.

    Words fill, in the order of the class's `words`, the settings that no option gives. An option overrides the recipe.
    Values on the command line are YAML too: `--freeze '[embeddings, layers.0]'`.

    Args:
        program: name of the program in usage lines; by default the script's name.
        plan: as in `build_settings`.

    Raises:
        ValueError: a setting is unknown, of the wrong type, or contradicts another one.
        SystemExit: after --help.
    """
    parser = settings_parser(settings_class, program)
    parser.add_argument("words", nargs="*", default=[])
    arguments = vars(parser.parse_args(argv))
    arguments |= _settings_of_words(settings_class, arguments.pop("words"), arguments, program)
    recipe, select = arguments.pop("recipe", None), arguments.pop("select", [])
    if select and (not recipe or not all("=" in item for item in select)):
        raise ValueError(f"--select {' '.join(select)} must be GROUP=LEVEL of a --recipe")
    values = _parse_values(settings_class, arguments)
    return build_settings(settings_class, values, recipe, dict(item.split("=", 1) for item in select), plan)


def parse_some(options_class: type[_Settings], argv: list[str]) -> tuple[_Settings, list[str]]:
    """Return the options of a dataclass, such as `HubOptions`, and the rest of a command line.

    Raises:
        ValueError: an option is of the wrong type, or contradicts another one.
    """
    parser = OptionParser(add_help=False, argument_default=argparse.SUPPRESS)
    add_fields(parser, options_class)
    found, rest = parser.parse_known_args(argv)
    return build(options_class, _parse_values(options_class, vars(found))), rest


def _parse_values(options_class: Any, texts: Mapping[str, str]) -> dict[str, Any]:
    """Read the texts of the command line as YAML, as far as the types of the fields are not text."""
    kinds = {field.name: alternatives(field.type) for field in dataclasses.fields(options_class)}
    values: dict[str, Any] = dict(texts)
    for name, text in texts.items():
        if text == "":
            raise ValueError(f"--{name.replace('_', '-')} is empty")
        with suppress(ValueError):  # text that is no YAML stays as it is
            value = parse_yaml(text, "the command line")
            if str not in kinds[name] or isinstance(value, str | None):  # a folder called 2026_11_26 is no number
                values[name] = value
    return values


def settings_parser(settings_class: Any, program: str = "", everyday: bool = False) -> OptionParser:
    """Return a parser of the options of a settings class, whose help has an example.

    Args:
        program: the command, such as "hf-vit finetune".
        everyday: add only the options that most runs need. Otherwise `--help` describes these, and `--help all` all.
    """
    parser = OptionParser(
        prog=program or None,
        usage=f"%(prog)s {_metavars(settings_class)} [--recipe RECIPE] [--option VALUE ...]",
        description=f"{settings_class.__doc__}\n\n{settings_class.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    about = "describe all options"
    parser.add_argument(
        "-h", "--help", nargs="?", const="", metavar="all", help=about, action=_Help, settings_class=settings_class
    )
    add_options(parser, settings_class, everyday)
    return parser


class _Help(argparse.Action):
    """`--help` prints the everyday options, and `--help all` all of them."""

    def __init__(self, *names: Any, settings_class: Any, **options: Any):
        super().__init__(*names, **options)
        self.settings_class = settings_class

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        described = settings_parser(self.settings_class, parser.prog, everyday=values != "all")
        if values == "all":
            add_fields(described, HubOptions)
        else:
            described.epilog = f"`{parser.prog} --help all` describes all options."
        described.print_help()
        raise SystemExit


def _metavars(settings_class: Any) -> str:
    """Describe the words of a command: MODEL DATA [OUTPUT]."""
    names = {"model": "MODEL", "dataset": "DATA", "output_dir": "[OUTPUT]"}
    return " ".join(names[word] for word in settings_class.words)


def _settings_of_words(settings_class: Any, words: list[str], given: Mapping[str, Any], program: str) -> dict[str, str]:
    """Return the settings that the words of a command line give.

    Raises:
        ValueError: there are too many words, or the data stands where the model belongs.
    """
    free = [name for name in settings_class.words if name not in given]
    if len(words) > len(free):
        raise ValueError(
            f"{words[len(free)]} is one word too many: the command is {program} {_metavars(settings_class)}, and each "
            "of them may be an option instead"
        )
    found = dict(zip(free, words, strict=False))
    if "model" in found and "dataset" in found:
        check_order(program, found["model"], found["dataset"])
    return found


def add_options(parser: argparse.ArgumentParser, settings_class: Any, everyday: bool = False) -> None:
    """Add `--recipe`, `--select` and an option for each field, or only for those that most runs need."""
    parser.add_argument("--recipe", help="recipe to start from: a name (see `hf-vit recipes`), a YAML file or its URL")
    if everyday:
        add_fields(parser, settings_class, everyday)
        return
    select = "levels of the recipe's options, such as positions=relative for small (`hf-vit recipes show NAME`)"
    parser.add_argument("--select", nargs="+", metavar="GROUP=LEVEL", help=select)
    add_fields(parser, settings_class)


def add_fields(parser: argparse.ArgumentParser, options_class: Any, everyday: bool = False) -> None:
    """Add an option for each field of a dataclass, with its heading, help and default."""
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(options_class):
        if everyday and not field.metadata["everyday"]:
            continue
        heading = "everyday settings" if everyday else field.metadata["group"]
        groups[heading] = groups.get(heading) or parser.add_argument_group(heading)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        about = field.metadata["about"]
        if field.metadata["protocols"]:
            about = f"{', '.join(field.metadata['protocols'])}: {about}"
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
