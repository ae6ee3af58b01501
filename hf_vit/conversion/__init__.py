"""Reading and writing other people's checkpoints: one rule table per source."""

from .converting import convert
from .jax_writing import export_jax
from .rules import ConversionError

__all__ = ["ConversionError", "convert", "export_jax"]
