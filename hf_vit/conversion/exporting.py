"""From a model to somebody else's checkpoint or program."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..files.output import refuse_existing
from ..images.image_processing_hf_vit import HfViTImageProcessor
from ..models.configuration_hf_vit import Size
from ..models.pretrained import HfVisionPreTrainedModel
from .beside import export_beside
from .deployment import RUNTIMES, export_deployment
from .programs import export_aot_inductor, export_onnx, export_torch
from .rules import ConversionError
from .source import Source, Writing
from .sources import SOURCES

logger = logging.get_logger(__name__)

_PROGRAMS: dict[str, Callable[..., None]] = {
    "onnx": export_onnx,
    "torch-export": export_torch,
    "aot-inductor": export_aot_inductor,
}
_WITH_SIZE = tuple(dict.fromkeys((*_PROGRAMS, *RUNTIMES)))
FORMATS = (*dict.fromkeys(source.format for source in SOURCES if source.format), *_WITH_SIZE)


def export(
    model: HfVisionPreTrainedModel,
    path: str | os.PathLike,
    to: str,
    *,
    processor: HfViTImageProcessor | None = None,
    dialect: str | None = None,
    size: Size | str | None = None,
    beside: str | os.PathLike | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a model in one of `FORMATS`.

    Args:
        path: a file; for "transformers" a folder; for "timm" either; for "openvino", and for "onnx" unless it ends in
            .onnx, a deployment folder: see `export_deployment`.
        processor: its image processor, for "transformers" and a deployment folder.
        dialect: for "jax"; see `export_jax`.
        size: of the images, for programs: an int, (height, width) or "dynamic" (not in a deployment folder).
        beside: for "jax"; see `export_jax`.
        overwrite: whether `path` may be replaced.

    Returns:
        What the format leaves to whoever loads it: for "timm", arguments of `create_model`.

    Raises:
        ConversionError: the format has no such model, or the size does not fit.
        FileExistsError: `path` exists and may not be overwritten.
    """
    if to not in FORMATS:
        raise ConversionError(f"unknown format {to!r}; known: {', '.join(FORMATS)}")
    refuse_existing(path, overwrite)
    if to != "jax" and getattr(model.config, "is_flexible", False):
        model = _fixed(model, size)
    if to in RUNTIMES and not (to == "onnx" and Path(path).suffix == ".onnx"):
        if Path(path).suffix in (".onnx", ".xml"):
            raise ConversionError(f"cannot write {path}: --to {to} writes a folder (expected a name without a suffix)")
        export_deployment(model, path, to, processor, size, overwrite)
        return {}
    if to in _PROGRAMS:
        _PROGRAMS[to](model, path, size, overwrite)
        return {}
    if size is not None:
        raise ConversionError(f"a size can only be given for {', '.join(_WITH_SIZE)}; convert at that size instead")
    if beside is not None:
        if to != "jax" or dialect is not None:
            raise ConversionError("beside is for jax, without a dialect: names are those of the file beside")
        export_beside(model, Path(path), str(beside))
        return {}
    width = getattr(model.config, "projection_dim", None)
    if to == "jax" and width is not None:
        logger.warning(
            f"The projection to {width} numbers is written as the head, and reads back as a classifier of {width} "
            "classes; with beside=ORIGINAL it stays a projection."
        )
    source, dialect = _writer(model, to, dialect)
    return source.write(model, Path(path), Writing(dialect, processor, overwrite))


def _fixed(model: Any, size: Size | str | None) -> Any:
    """A copy of a flexible model with resized weights: nobody else stores a kernel of another size than its patches."""
    model = copy.deepcopy(model)
    if size is not None and not isinstance(size, str):
        model.set_image_size(size, processor_follows=True)
    model.make_fixed()
    return model


def export_jax(
    model: HfVisionPreTrainedModel,
    path: str | os.PathLike,
    dialect: str | None = None,
    *,
    beside: str | os.PathLike | None = None,
) -> None:
    """Write a model as an .npz that the original code loads.

    What was converted from an .npz comes back bit by bit in the dialect that it was read in: every array of the model
    has its name, shape and values. Not written are a prefix of all names, arrays beside the model's, the stacking of
    blocks, and a number format other than that of the model (float32 after `convert`); with `beside`, all of these are,
    and a model that was not trained on gives the same file again, array by array. A projection is written as the head.

    Args:
        model: with or without a head. A model converted from a file whose all-zero head was left out gets it back.
        path: the .npz to write; it appears when it is complete.
        beside: the file that the model was converted from: what it holds beside the model (a text tower, a language
            model) is copied, one array in memory at a time; names, prefix, order, stacking and dtypes are its.
        dialect: "vit_jax" (names of the released files), "flax" (those of present-day Flax) or "big_vision"; by
            default the first of them that has such a model; of a BiT "big_transfer" or "big_vision", by default the one
            that computes as the model does.

    Raises:
        ConversionError: the dialect has no such model, or `beside` is another file or does not fit it.
        NpzError: the file cannot be written.
    """
    export(model, path, "jax", dialect=dialect, beside=beside, overwrite=True)


def export_timm(model: HfVisionPreTrainedModel, path: str | os.PathLike, overwrite: bool = False) -> dict[str, Any]:
    """Write a model as timm has it.

    A file holds the weights alone. A folder says too how the model is built, so that
    `timm.create_model("local-dir:FOLDER")` computes what this model computes.

    Args:
        model: with or without a head.
        path: a .safetensors file, or a folder; it appears when it is complete.
        overwrite: whether it may replace what is there.

    Returns:
        The arguments of `timm.create_model` with which the weights compute the same: timm's defaults differ, since
        released models have tanh GELU.

    Raises:
        ConversionError: timm has no such model.
        FileExistsError: `path` exists and may not be overwritten.
    """
    return export(model, path, "timm", overwrite=overwrite)


def export_transformers(
    model: HfVisionPreTrainedModel,
    folder: str | os.PathLike,
    processor: HfViTImageProcessor | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model as transformers' `ViTForImageClassification`, or `ViTModel` where it has no head; BiT as `Bit...`.

    Masked patch prediction of pixels is its `ViTForMaskedImageModeling`. This package is not needed to load it.

    Args:
        model: with a class token and learned position embeddings; a hybrid has no counterpart in transformers 5.
        folder: to write; it appears when it is complete.
        processor: its image processor, of which size, mean and deviation are written too. The pixels of transformers'
            own processor differ from it by what is between two ways of resizing.
        overwrite: whether `folder` may be replaced.

    Raises:
        ConversionError: transformers has no such model.
        FileExistsError: `folder` exists and may not be overwritten.
    """
    export(model, folder, "transformers", processor=processor, overwrite=overwrite)


def _writer(model: HfVisionPreTrainedModel, to: str, dialect: str | None) -> tuple[Source, str]:
    """The source that writes a model in a format, and its dialect ("" for a format without)."""
    takers = [source for source in SOURCES if source.format == to and isinstance(model, source.models)]
    if not takers:
        raise ConversionError(f"{type(model).__name__} has no counterpart in {to}; convert its encoder or classifier")
    known = list(dict.fromkeys(name for source in takers for name in source.dialects))
    if dialect not in (None, *known):
        raise ConversionError(f"unknown dialect {dialect!r} of {to}; for such a model: {', '.join(known) or 'none'}")
    choices = [(source, name) for source in takers for name in source.dialects if dialect in (None, name)]
    lacking = [source.lacks(model, name) for source, name in choices]
    fitting = [choice for choice, lacks in zip(choices, lacking, strict=True) if not lacks]
    if not fitting:
        raise ConversionError(f"{choices[0][1] or to} has no {', no '.join(lacking[0])}")
    return fitting[0]
