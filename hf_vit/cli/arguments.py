"""The commands of `hf-vit`, by subject; each module is imported by `--help`, so it imports nothing heavy itself."""

import argparse
from collections.abc import Callable


def add_command(commands, name: str, run: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
    """A subcommand that calls `run` with its arguments."""
    command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    command.set_defaults(run=run, takes_settings=False)
    return command


def parse_size(text: str) -> int | tuple[int, int]:
    """`384` or `384x512`, height first."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is neither N nor HxW with numbers from 1")
    return int(parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
