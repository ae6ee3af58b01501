"""Reading and writing other people's checkpoints: one rule table per source."""

from .converting import convert, convert_to_folder
from .exporting import export
from .jax.writing import export_jax
from .programs import export_aot_inductor, export_onnx, export_torch
from .rules import ConversionError
from .timm.writing import export_timm
from .transformers.writing import export_transformers

__all__ = [
    "ConversionError",
    "convert",
    "convert_to_folder",
    "export",
    "export_aot_inductor",
    "export_jax",
    "export_onnx",
    "export_timm",
    "export_torch",
    "export_transformers",
]
