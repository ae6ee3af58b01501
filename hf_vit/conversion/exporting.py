"""Export of a model to another project's checkpoint, or to a program."""

import copy
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..catalog import address_of
from ..files.download import sha256_at
from ..files.messages import check_choice
from ..files.npz import write_npz
from ..files.output import new_file, new_folder, refuse_existing, refuse_inputs
from ..files.removed_names import check_removed
from ..models.configuration_hf_vit import HfViTConfig
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.pretrained import HfVisionPreTrainedModel
from ..models.sizes import Size, as_pair
from .checkpoint import Checkpoint, fetch_any, open_checkpoint
from .jax.checkpoints import JaxSource
from .jax.tables import POSITIONS
from .reading_back import read_npz_back
from .recognition import SOURCES, recognize
from .source import ConvertOptions, Grid, KeyMapping, Source, record_of
from .tables import ConversionError, name_checkpoint

logger = logging.get_logger(__name__)

_WRITERS = [source for source in SOURCES if source.format]
# The options of each format
_CHECKPOINTS = {"jax": ("dialect", "original"), "transformers": (), "timm": ()}
_PROGRAMS = {"onnx": ("size",), "openvino": ("size",), "torch-export": ("size",), "web": ("runtime",)}
FORMATS: dict[str, tuple[str, ...]] = {**_CHECKPOINTS, **_PROGRAMS}


def export(
    model: HfVisionPreTrainedModel,
    path: str | os.PathLike,
    to: str,
    *,
    processor: HfViTImageProcessor | None = None,
    dialect: str | None = None,
    size: Size | str | None = None,
    original: str | os.PathLike | None = None,
    runtime: str | os.PathLike | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write a model in one of `FORMATS`.

    - "jax": an .npz that the original code loads. A model converted from an .npz is restored bit for bit in its own
      dialect: name, shape and values of every array of the model, also a head of zeros that the conversion dropped.
      Other properties of the file are not restored: a prefix of all names, arrays of other parts, stacking of blocks,
      and dtypes (the model is float32 after `convert`). With `original`, these are restored too; without further
      training, the result then equals the original array by array. A projection is written as the head.
    - "timm": a .safetensors file of the weights, or a folder that also describes the architecture, so that
      `timm.create_model("local-dir:FOLDER")` computes the same.
    - "transformers": a folder of transformers' own class, which loads without this package:
      `ViTForImageClassification`, or `ViTModel` without a head; `SiglipVisionModel`; `Bit...`; and
      `ViTForMaskedImageModeling` for masked patch prediction of pixels. The pixel values of its image processor differ,
      because it resizes in another way.
    - "onnx" (extra `export`) and "openvino" (extra `openvino`): a deployment folder, which runs without this package
      and torch; see `hf_vit.runtimes.deployment`. For "onnx" a `path` that ends in .onnx is the program alone.
    - "torch-export": a `torch.export` program, a .pt2 file; `torch.export.load(path).module()` runs it.
    - "web": a static page that classifies in a browser; see `hf_vit.runtimes.web`.

    Programs take any batch size; those of ONNX and OpenVINO compute in float32.

    Before the file or folder appears, its reader opens it (NumPy, transformers, timm if it is installed, ONNX Runtime,
    OpenVINO, PyTorch) and must compute the model's outputs.

    Args:
        model: a model, with or without a head, on the CPU; for a deployment folder also an `Int8Model`.
        path: a file or folder, as above; it appears when it is complete.
        processor: the model's image processor, for "transformers", a deployment folder and images of any size.
        dialect: for "jax": "vit_jax" (names of the released files), "flax" (names of present-day Flax) or "big_vision";
            by default the first that supports the model. For a BiT "big_transfer" or "big_vision"; by default the one
            that computes like the model.
        original: for "jax": the file that the model was converted from. Its other parts (a text tower, a language
            model) are copied, one array at a time; names, prefix, order, stacking and dtypes are those of this file.
        size: for programs, the image size in pixels: an int or (height, width), by default the model's own; position
            embeddings are resampled once. "dynamic" (not in a deployment folder) means every size that the patches
            divide. For "onnx" also "any", a program that resizes images itself: see `hf_vit.runtimes.any_size`.
        runtime: for "web"; see `hf_vit.runtimes.web`.
        overwrite: replace what exists at `path`.

    Returns:
        Settings that the format does not store: for "timm", arguments of `create_model` for the same results (timm's
        defaults differ; released models have tanh GELU); otherwise empty.

    Raises:
        ValueError: the format does not support the model or an option, the size does not fit, the model was not
            converted from `original`, or the reader computes other outputs.
        FileExistsError: `path` exists and may not be overwritten.
        ImportError: the extra is not installed.
    """
    check_removed("format", to)
    check_choice("format", to, FORMATS)
    if dialect is not None and original is not None:
        raise ConversionError("cannot export with dialect and original, whose names are kept; omit one of them")
    for name, value in {"dialect": dialect, "size": size, "original": original, "runtime": runtime}.items():
        if value is not None and name not in FORMATS[to]:
            raise ConversionError(f"cannot export to {to} with {name}; omit it")
    refuse_inputs(path, model.name_or_path or None, original, runtime)
    refuse_existing(path, overwrite)
    if to != "jax":  # no other format supports flexible models
        model = _make_fixed(model, size)
    if to in _PROGRAMS:
        from ..runtimes.exporting import export_program  # the leaf of programs, only when one is asked for

        export_program(model, path, to, processor=processor, size=size, runtime=runtime, overwrite=overwrite)
        return {}
    if original is not None:
        _export_with_original(model, Path(path), str(original))
        return {}
    writer, dialect = find_writer(model, to, dialect)
    _warn_of_losses(model.config, to)
    is_folder = to == "transformers" or (to == "timm" and Path(path).suffix != ".safetensors")
    open_output = new_folder if is_folder else new_file
    with open_output(path, overwrite) as draft:
        return writer.write(model, draft, dialect, processor) or {}


def _make_fixed(model: Any, size: Size | str | None) -> Any:
    """Return a copy of a flexible model with fixed patches; any other model as it is."""
    if not getattr(model.config, "is_flexible", False) or hasattr(model, "write_program"):  # the latter: an Int8Model
        return model
    fixed = copy.deepcopy(model)
    if size is not None and not isinstance(size, str):
        fixed.set_image_size(size)
    fixed.make_fixed()
    return fixed


def _warn_of_losses(config: Any, to: str) -> None:
    width = getattr(config, "projection_dim", None)
    if to == "jax" and width is not None:
        logger.warning(
            f"The projection to {width} features is written as the head, so the file converts back to a classifier "
            f"of {width} classes; pass original=ORIGINAL to keep a projection."
        )
    if to == "transformers":
        return
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        logger.warning(f"{to} does not store that an image has several labels: take the sigmoid of each logit")
    if problem == "regression":
        logger.warning(f"{to} does not store that the logits are numbers of a regression: take them as they are")


def find_writer(model: HfVisionPreTrainedModel, to: str, dialect: str | None = None) -> tuple[Source, str]:
    """Return the writer of a model in a format, and its dialect ("" for a format without dialects).

    Raises:
        ConversionError: the format does not support the model; the message says why.
    """
    known = []
    problems = []
    for writer in _WRITERS:
        if writer.format != to or not isinstance(model, writer.models):
            continue
        known += writer.dialects
        for name in writer.dialects:
            if dialect not in (None, name):
                continue
            unsupported = writer.unsupported(model, name)
            if not unsupported:
                return writer, name
            problems.append(f"{name or to} does not have {', '.join(unsupported)}")
    if problems:
        raise ConversionError(problems[0])
    names = ", ".join(known) or "none, only its encoder or classifier"
    raise ConversionError(f"{dialect or to} has no counterpart of a {type(model).__name__} (expected for it: {names})")


def _export_with_original(model: HfVisionPreTrainedModel, path: Path, original: str) -> None:
    """Write a copy of the checkpoint `original` as .npz, with the arrays of `model` instead of its own.

    Names, order, stacking and dtypes are those of `original`. Its other arrays are copied, one at a time.

    Args:
        model: the model.
        path: the .npz to write.
        original: path or URL of the checkpoint that the model was converted from.

    Raises:
        ConversionError: the model was not converted from `original`, or `original` holds another architecture.
    """
    fetched = fetch_any(address_of(original))
    with open_checkpoint(fetched) as checkpoint, name_checkpoint(original):
        source, naming = recognize(checkpoint, ConvertOptions(_grid_as_read(model.config)))
        if not isinstance(source, JaxSource) or not isinstance(model, source.models):
            raise ConversionError(f"it is not an original JAX checkpoint of a {type(model).__name__}")
        record = record_of(model)
        sha256 = fetched.sha256 or sha256_at(checkpoint.path)
        if record.get("sha256", sha256) != sha256:
            raise ConversionError(
                f"its sha256 is {sha256}; the model was converted from {record['file']}, {record['sha256']}"
            )
        arrays = source.arrays(model, naming.dialect)  # views, no copies
        found = {name: tuple(array.shape) for name, array in arrays.items()}
        expected = {}
        for name, stored in naming.arrays.items():
            shape = checkpoint.shapes[stored.name]
            expected[name] = shape if stored.index is None else shape[1:]
        if getattr(model.config, "image_size_history", None):  # resampled
            found[POSITIONS] = expected.get(POSITIONS, ())
        different = sorted(found.items() ^ expected.items())
        if different:
            raise ConversionError(f"it has other arrays than the model, such as {different[0]}")
        with new_file(path, overwrite=True, flush=True) as draft:
            write_npz(draft, _merge(arrays, checkpoint, naming))
            read_npz_back(draft)


def _grid_as_read(config: Any) -> Grid:
    """Return (rows, columns) of the positions in the file of a model, before any resampling; None for a BiT."""
    if not isinstance(config, HfViTConfig):
        return None
    if config.is_flexible:
        return config.stored_grid
    first_size = (config.image_size_history or [config.image_size])[0]
    return config.grid_of(*as_pair(first_size))


def _merge(
    arrays: Mapping[str, torch.Tensor], checkpoint: Checkpoint, naming: KeyMapping
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, array) of the whole file in its order; the model's arrays replace their originals, in their dtype.

    Raises:
        ConversionError: a value is too large for the dtype.
    """
    parts = defaultdict(list)  # one array, or all of a stack
    stacks = set()
    for name, stored in naming.arrays.items():
        parts[stored.name].append(arrays[name])
        if stored.index is not None:
            stacks.add(stored.name)
    for stored_name in checkpoint.shapes:
        if stored_name not in parts:
            yield stored_name, checkpoint.read(stored_name)
            continue
        array = parts[stored_name][0]
        if stored_name in stacks:
            array = torch.stack(parts[stored_name])
        dtype = checkpoint.dtypes[stored_name]
        array = array.to(getattr(torch, dtype, array.dtype))
        if not torch.isfinite(array).all():
            raise ConversionError(
                f"cannot write {stored_name}: it has values that are not finite in the file's dtype, {dtype}"
            )
        yield stored_name, array
