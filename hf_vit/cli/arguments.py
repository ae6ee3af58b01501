"""Helpers for all commands: add a command, and parse common arguments."""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], None], about: str
) -> argparse.ArgumentParser:
    """Add a subcommand that calls `run` with its arguments; `about` is its help."""
    command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
    command.set_defaults(run=run, takes_settings=False, parser=command)
    return command


def parse_size(text: str) -> int | tuple[int, int]:
    """Parse `384` or `384x512`, height first."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"cannot read {text!r} as a size (expected N or HxW, such as 384 or 384x512)")
    return int(parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def refuse_source(output: Path, source: str) -> None:
    """Raise ValueError if the output would replace the folder that it is made from, or one around it."""
    folder = Path(source).resolve()
    if Path(source).is_dir() and output.resolve() in (folder, *folder.parents):
        raise ValueError(f"cannot write {output}: it is the folder of {source}, or around it; name another place")


def need_analysis(package: str) -> None:
    """Raise ValueError if a package of the extra `analysis` is not installed; nothing is imported."""
    if find_spec(package) is None:
        raise ValueError(f"this needs {package}, which is not installed: pip install 'hf_vit[analysis]'")
