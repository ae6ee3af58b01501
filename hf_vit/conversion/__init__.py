"""Conversion of other projects' checkpoints, in both directions: one rule table per source."""

from .converting import check, convert, convert_to_folder, fingerprint
from .exporting import export, export_jax, export_timm, export_transformers
from .programs import export_aot_inductor, export_onnx, export_torch
from .tables import ConversionError

__all__ = [
    "ConversionError",
    "check",
    "convert",
    "convert_to_folder",
    "export",
    "export_aot_inductor",
    "export_jax",
    "export_onnx",
    "export_timm",
    "export_torch",
    "export_transformers",
    "fingerprint",
]
