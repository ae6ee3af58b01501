"""Command line `hf-vit COMMAND`, with one module for each subject.

A command imports its module, and `--help` all of them, so each command imports its libraries when it runs.
"""

from .command_line import build_parser, main

__all__ = ["build_parser", "main"]
