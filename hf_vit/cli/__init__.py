"""`hf-vit <command>`: arguments become calls, one module for each subject.

These modules are imported even by `--help`, so what a command needs is imported when it runs.
"""

from .command_line import build_parser, main

__all__ = ["build_parser", "main"]
