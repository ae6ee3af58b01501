"""`hf-vit export`: which format is written how."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files.output import refuse_existing
from ..models.configuration_hf_vit import Size
from ..models.pretrained import HfViTPreTrainedModel
from .jax.writing import export_jax
from .programs import export_aot_inductor, export_onnx, export_torch
from .rules import ConversionError
from .timm.writing import export_timm
from .transformers.writing import export_transformers

PROGRAMS: dict[str, Callable[..., None]] = {
    "onnx": export_onnx,
    "torch-export": export_torch,
    "aot-inductor": export_aot_inductor,
}
FORMATS = ("jax", "transformers", "timm", *PROGRAMS)


def export(
    model: HfViTPreTrainedModel,
    path: str | os.PathLike,
    to: str,
    *,
    processor: Any = None,
    dialect: str | None = None,
    size: Size | str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a model in one of `FORMATS`.

    Args:
        path: a file; for "transformers" a folder; for "timm" either.
        processor: its image processor, for "transformers".
        dialect: for "jax"; see `export_jax`.
        size: of the images, for programs: an int, (height, width) or "dynamic".
        overwrite: whether `path` may be replaced.

    Returns:
        What the format leaves to whoever loads it: for "timm", arguments of `create_model`.

    Raises:
        ConversionError: the format has no such model, or the size does not fit.
        FileExistsError: `path` exists and may not be overwritten.
    """
    if to not in FORMATS:
        raise ConversionError(f"unknown format {to!r}; known: {', '.join(FORMATS)}")
    if size is not None and to not in PROGRAMS:
        raise ConversionError(f"a size can only be given for {', '.join(PROGRAMS)}; convert at that size instead")
    if to in PROGRAMS:
        PROGRAMS[to](model, path, size, overwrite)
        return {}
    if to == "timm":
        return export_timm(model, path, overwrite)
    if to == "transformers":
        export_transformers(model, path, processor, overwrite)
        return {}
    refuse_existing(path, overwrite)
    export_jax(model, Path(path), dialect)
    return {}
