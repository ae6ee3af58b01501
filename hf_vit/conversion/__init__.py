"""Conversion of other projects' checkpoints, in both directions: one rule table per source."""

from .converting import Conversion, convert, fingerprint
from .exporting import export
from .tables import ConversionError

__all__ = ["Conversion", "ConversionError", "convert", "export", "fingerprint"]
