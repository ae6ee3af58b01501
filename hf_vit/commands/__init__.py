"""The commands of `hf-vit`, by subject; each module is imported by `--help`, so it imports nothing heavy itself."""

import argparse
from collections.abc import Callable


def add_command(commands, name: str, run: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
    """A subcommand that calls `run` with its arguments."""
    command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    command.set_defaults(run=run, takes_settings=False)
    return command
