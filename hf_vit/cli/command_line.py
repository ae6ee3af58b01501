"""The program `hf-vit`."""

import argparse
from collections.abc import Sequence

from ..files.messages import ends_in_one_sentence
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
        with ends_in_one_sentence(f"hf-vit {arguments.command}"):
            arguments.run(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    about = "`hf-vit <command>`: thin, and quick to answer, since it imports what a command needs when it runs."
    parser = argparse.ArgumentParser(prog="hf-vit", description=about, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for subject in _SUBJECTS:
        subject.add_commands(commands)
    return parser
