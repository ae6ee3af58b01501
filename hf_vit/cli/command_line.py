"""Program `hf-vit`."""

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..files.messages import did_you_mean, ends_in_one_sentence, with_dashes
from . import analysis, catalog, conversion, demo, environment, hub, prediction, quantization, retrieval, training

# In the order of --help
_SUBJECTS = (conversion, prediction, retrieval, quantization, training, hub, catalog, analysis, demo, environment)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status, 2 after an error, which is one sentence on standard error."""
    given = list(sys.argv[1:] if argv is None else argv)
    names = given.index("--") if "--" in given else len(given)  # no options from there on
    arguments, more = build_parser().parse_known_args([*map(with_dashes, given[:names]), *given[names:]])
    if more and not arguments.takes_settings:
        _refuse_option(more[0], arguments.parser)
    arguments.settings = more
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files and classes that its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with ends_in_one_sentence(f"hf-vit {arguments.command}"):
            arguments.run(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _refuse_option(option: str, parser: argparse.ArgumentParser) -> NoReturn:
    """End with a sentence about an unknown option, or one argument too many."""
    if not option.startswith("-"):
        parser.error(f"there is one argument too many: {option}")
    if os.path.lexists(option):
        parser.error(f"there is no option {option}; write ./{option} for the file")
    known = [name for action in parser._actions for name in action.option_strings]
    parser.error(f"there is no option {option}{did_you_mean(option.split('=')[0], known)}")


class _Parser(argparse.ArgumentParser):
    """Argument parser whose error for an unknown command suggests the most similar one."""

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument \w+: invalid choice: '(.*?)' \(choose from (.*)\)", message, re.DOTALL)
        if wrong:
            name, known = wrong[1], [word.strip(" '") for word in wrong[2].split(",")]
            message = f"there is no command {name}{did_you_mean(name, known)} (hf-vit --help lists them)"
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    about = "The original Vision Transformer family in the Hugging Face ecosystem. Each command has its own --help."
    parser = _Parser(prog="hf-vit", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=environment.own_version())
    parser.set_defaults(root=parser)  # for shell completion
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    for subject in _SUBJECTS:
        subject.add_commands(commands)
    for command in commands.choices.values():
        _name_values(command)
    return parser


def _name_values(parser: argparse.ArgumentParser) -> None:
    """Name the values of options by their kind in the help, as the settings of the training scripts do."""
    for action in parser._actions:
        if action.option_strings and action.nargs != 0 and not action.choices and action.metavar is None:
            kind = action.type if isinstance(action.type, type) else str
            action.metavar = {int: "INT", float: "FLOAT"}.get(kind, "TEXT")
