"""Export of a model as a program: ONNX, OpenVINO, torch.export, or a web page."""

import os
from pathlib import Path
from typing import Any

from ..models.sizes import Size
from .any_size import ANY_SIZE, check_any_size_onnx, make_any_size_onnx
from .deployment import RUNTIMES, export_deployment
from .programs import export_onnx, export_torch, write_onnx
from .web import write_web_page


def export_program(
    model: Any,
    path: str | os.PathLike,
    to: str,
    *,
    processor: Any = None,
    size: Size | str | None = None,
    runtime: str | os.PathLike | None = None,
    overwrite: bool = False,
) -> None:
    """Write a program; the arguments are those of `hf_vit.conversion.export`.

    Raises:
        ValueError: the format does not support the model or the size.
        ImportError: the extra is not installed.
    """
    is_onnx_file = to == "onnx" and Path(path).suffix == ".onnx"
    if to == "web":
        name = Path(model.config.name_or_path or "").name or "the model"
        write_web_page(path, {name: (model, processor)}, runtime=runtime, overwrite=overwrite)
    elif to in RUNTIMES and not is_onnx_file:
        export_deployment(model, path, to, processor, size, overwrite)
    elif to == "torch-export":
        export_torch(model, path, size, overwrite)
    elif size == ANY_SIZE:
        write_onnx(
            path,
            overwrite,
            lambda: make_any_size_onnx(model, processor),
            lambda file: check_any_size_onnx(file, model, processor),
        )
    else:
        export_onnx(model, path, size, overwrite)
