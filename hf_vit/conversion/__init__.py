"""Reading and writing other people's checkpoints: one rule table per source."""

from .converting import convert
from .exporting import export
from .graph_writing import export_aot_inductor, export_onnx, export_torch
from .jax_writing import export_jax
from .rules import ConversionError
from .timm_writing import export_timm
from .transformers_writing import export_transformers

__all__ = [
    "ConversionError",
    "convert",
    "export",
    "export_aot_inductor",
    "export_jax",
    "export_onnx",
    "export_timm",
    "export_torch",
    "export_transformers",
]
