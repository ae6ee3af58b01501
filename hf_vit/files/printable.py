"""Text that cannot control a terminal."""

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    r"""Escape control characters, as \x1b, because labels and file names could control the terminal."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
