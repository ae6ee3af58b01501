"""Command line `hf-vit COMMAND`, with one module for each subject.

`--help` imports all of these modules, so each command imports its libraries when it runs.
"""

from .command_line import build_parser, main

__all__ = ["build_parser", "main"]
