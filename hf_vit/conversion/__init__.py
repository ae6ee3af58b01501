"""Conversion of other projects' checkpoints, in both directions: one rule table per source."""

from typing import Any

from ..files.removed_names import describe_removed
from .converting import Conversion, convert, fingerprint
from .exporting import export
from .tables import ConversionError

__all__ = ["Conversion", "ConversionError", "convert", "export", "fingerprint"]


def __getattr__(name: str) -> Any:
    if (removed := describe_removed(f"{__name__}.{name}")) is not None:
        raise ImportError(removed)  # not AttributeError, whose text `from ... import` drops
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
