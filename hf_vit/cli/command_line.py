"""The program `hf-vit`."""

import argparse
import sys
from collections.abc import Sequence

from . import analysis, catalog, conversion, demo, hub, prediction, training

_SUBJECTS = (conversion, prediction, training, hub, catalog, analysis, demo)  # in the order of --help


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one sentence on standard error and exit status 2."""
    parser = build_parser()
    arguments, settings = parser.parse_known_args(argv)
    if settings and not arguments.takes_settings:
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    arguments.settings = settings
    try:
        arguments.run(arguments)
    except (ValueError, OSError, ImportError) as error:  # ImportError: an extra is not installed
        print(f"hf-vit {arguments.command}: {_one_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hf-vit {arguments.command}: interrupted; nothing half-written was left", file=sys.stderr)
        return 130
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    about = "`hf-vit <command>`: thin, and quick to answer, since it imports what a command needs when it runs."
    parser = argparse.ArgumentParser(prog="hf-vit", description=about, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for subject in _SUBJECTS:
        subject.add_commands(commands)
    return parser


def _one_sentence(error: BaseException) -> str:
    """What is wrong, without the names of the validators that found it."""
    while type(error).__name__.startswith("StrictDataclass") and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())
