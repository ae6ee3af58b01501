"""Conversion of other projects' checkpoints, in both directions: one rule table per source."""

from typing import NoReturn

from ..files.removed_names import refuse_removed
from .converting import Conversion, convert, fingerprint
from .exporting import export
from .tables import ConversionError

__all__ = ["Conversion", "ConversionError", "convert", "export", "fingerprint"]


def __getattr__(name: str) -> NoReturn:
    refuse_removed(__name__, name)
