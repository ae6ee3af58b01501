"""Export to programs that run without this package: ONNX, OpenVINO and torch.export.

Every program has an input `pixel_values` (batch, num_channels, height, width) with any batch size. By default it has
one output: `logits` (a classifier), `image_embeds` (an encoder with a projection) or `pooler_output` (another encoder).
"""

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from ..conversion.reading_back import TOLERANCES, check_outputs, noise
from ..conversion.source import MODELS
from ..conversion.tables import ConversionError
from ..files.output import list_in_marker, new_file, refuse_existing
from ..files.versions import require
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vit import HfViTConfig
from ..models.pretrained import HfVisionPreTrainedModel
from ..models.sizes import Size, as_pair

_DYNAMIC = "dynamic"
_MAX_PATCHES = 1024  # maximum rows or columns of a program with a dynamic size
PROGRAM_MODELS = (*MODELS[HfViTConfig], *MODELS[HfBiTConfig])
Scaling = tuple[torch.Tensor, torch.Tensor]  # (scale, offset): the program first computes x * scale + offset


class _Outputs(nn.Module):
    """A model whose forward takes only the pixels, and returns selected results as tensors."""

    def __init__(self, model: HfVisionPreTrainedModel, names: Sequence[str], scaling: Scaling | None):
        super().__init__()
        self.model, self.names = model, list(names) or [_output_of(model)]
        self.scale, self.offset = map(nn.Buffer, scaling) if scaling else (None, None)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self.scale is not None and self.offset is not None:
            pixel_values = pixel_values * self.scale + self.offset
        if "pooler_output" in self.names:  # also of a classifier, whose forward does not return it
            is_pooled = {*self.names} <= {"pooler_output", "logits"} and isinstance(self.model.config, HfViTConfig)
            only_pooled = {"only_pooled": True} if is_pooled else {}
            outputs = self.model.base_model(pixel_values, **only_pooled)
            if "logits" in self.names:
                head: Any = self.model.classifier
                outputs["logits"] = head(outputs["pooler_output"])
        else:
            outputs = self.model(pixel_values)
        found: tuple[torch.Tensor, ...] = tuple(outputs[name] for name in self.names)
        return found[0] if len(found) == 1 else found


def _output_of(model: HfVisionPreTrainedModel) -> str:
    """Return the name of a program's default output."""
    if hasattr(model, "classifier"):
        return "logits"
    return "pooler_output" if getattr(model, "projection", None) is None else "image_embeds"


def export_onnx(
    model: HfVisionPreTrainedModel, path: str | os.PathLike, size: Size | str | None = None, overwrite: bool = False
) -> None:
    """Write a model as ONNX, for any batch size; needs the extra `export`.

    Args:
        model: model with or without a head; on the CPU. The program computes in float32.
        path: the .onnx to write, with its weights; it appears when it is complete. Above 2 GB of weights, ONNX needs a
            second file, `path`.data.
        size: image size in pixels, an int or (height, width), by default the model's own; position embeddings are
            resampled once. "dynamic" means every size that the patches divide.
        overwrite: replace an existing file.

    Raises:
        ConversionError: the size does not fit the patches.
        FileExistsError: `path` exists and may not be overwritten.
        ImportError: the extra is not installed.
    """

    def check(file: Path) -> None:
        pixel_values, expected = example_outputs(model, size)
        found = run_onnx(file, pixel_values.float().numpy())
        check_outputs("ONNX Runtime", found, expected, TOLERANCES[model.dtype])

    write_onnx(path, overwrite, lambda: make_onnx(model, size), check)


def write_onnx(
    path: str | os.PathLike, overwrite: bool, make_program: Callable[[], Any], check: Callable[[Path], None]
) -> None:
    """Write the `torch.onnx.ONNXProgram` that a function makes, and its second file; arguments as in `export_onnx`.

    Args:
        check: opens the file, and raises an error if it is wrong.
    """
    refuse_existing(path, overwrite)
    program = make_program()
    with new_file(path, overwrite) as file:
        program.save(file)
        check(file)
        data = file.with_name(f"{file.name}.data")
        if data.exists():  # its name is in `file`, so it cannot have another
            refuse_existing(Path(path).with_name(data.name), overwrite)
            os.replace(data, Path(path).with_name(data.name))
            list_in_marker(f"{path}.data")
    list_in_marker(path)  # of a model folder, so that a push takes it


def run_onnx(file: Path, pixel_values: np.ndarray) -> np.ndarray:
    """Return what ONNX Runtime computes with a file: the first output."""
    require("onnxruntime")
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"pixel_values": pixel_values})[0])


def make_onnx(
    model: HfVisionPreTrainedModel,
    size: Size | str | None = None,
    names: Sequence[str] = (),
    scaling: Scaling | None = None,
) -> Any:
    """Make the `torch.onnx.ONNXProgram` of a model; its `save` writes a file. Arguments as in `trace`.

    The program computes in float32: ONNX Runtime has no convolution in bfloat16 on a CPU.
    """
    module, pixel_values, shapes = _prepare(model, size, names, scaling)
    return trace_onnx(module.float(), pixel_values.float(), shapes, module.names)


def trace_onnx(module: nn.Module, pixel_values: torch.Tensor, shapes: dict[str, Any], names: Sequence[str]) -> Any:
    """Export a module to a `torch.onnx.ONNXProgram`, with these dynamic axes and names of outputs."""
    require("onnx", "onnxscript")
    with quiet():
        program: Any = torch.onnx.export(
            module,
            (pixel_values,),
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=["pixel_values"],
            output_names=list(names),
            verbose=False,
        )
    program.model.graph.metadata_props.clear()
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # paths of source files on this machine
    return program


def make_openvino(
    model: HfVisionPreTrainedModel,
    size: tuple[int, int],
    path: str | os.PathLike,
    names: Sequence[str] = (),
    scaling: Scaling | None = None,
) -> None:
    """Write a program as OpenVINO's two files, .xml (`path`) and .bin; arguments as in `trace`.

    OpenVINO's `convert_model` is not used, because it sends telemetry by default.
    """
    require("openvino")
    import openvino
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    program = trace(model, size, names, scaling)
    with torch.no_grad(), quiet():
        decoder = TorchFXPythonDecoder.from_exported_program(program)  # must exist until the end of the conversion
        frontend = FrontEndManager().load_by_framework("pytorch")
        converted = frontend.convert(frontend.load(decoder))
    converted.reshape([-1, model.config.num_channels, *size])
    openvino.save_model(converted, path, compress_to_fp16=False)


def export_torch(
    model: HfVisionPreTrainedModel, path: str | os.PathLike, size: Size | str | None = None, overwrite: bool = False
) -> None:
    """Write a model as a `torch.export` program, a .pt2 file; `torch.export.load(path).module()` runs it.

    Arguments and errors as in `export_onnx`.
    """
    if Path(path).suffix != ".pt2":
        raise ConversionError(f"cannot write {path}: PyTorch's programs end in .pt2; rename it")
    refuse_existing(path, overwrite)
    program = trace(model, size)
    with new_file(path, overwrite) as file, quiet():
        torch.export.save(program, file)
        pixel_values, expected = example_outputs(model, size)
        with torch.no_grad():
            found = torch.export.load(file).module()(pixel_values)
        check_outputs("PyTorch", found, expected, TOLERANCES[model.dtype])


def trace(
    model: HfVisionPreTrainedModel,
    size: Size | str | None = None,
    names: Sequence[str] = (),
    scaling: Scaling | None = None,
) -> ExportedProgram:
    """Export a model with `torch.export`, for any batch size.

    Args:
        model: model with or without a head.
        size: as in `export_onnx`.
        names: names of the outputs; by default the one output that this module describes.
        scaling: normalization of the input inside the program; None if the program takes normalized pixels.
    """
    module, pixel_values, shapes = _prepare(model, size, names, scaling)
    with torch.no_grad(), quiet():
        return torch.export.export(module, (pixel_values,), dynamic_shapes=shapes)


def example_outputs(
    model: HfVisionPreTrainedModel,
    size: Size | str | None,
    names: Sequence[str] = (),
    pixel_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixel values, by default noise, and what a program for images of that size must compute."""
    module, _, _ = _prepare(model, size, names, None)
    if pixel_values is None:
        pixel_values = noise(module.model.config).to(model.dtype)
    with torch.no_grad():
        return pixel_values, module(pixel_values)


def _prepare(
    model: HfVisionPreTrainedModel, size: Size | str | None, names: Sequence[str], scaling: Scaling | None
) -> tuple[_Outputs, torch.Tensor, dict[str, dict[int, Any]]]:
    """Return the module to export (a copy of the model at that size), an example input, and the dynamic axes."""
    if not isinstance(model, PROGRAM_MODELS):
        raise ConversionError(f"cannot export {type(model).__name__}; export its encoder or its classifier")
    model = copy.deepcopy(model).eval()
    # with a bias, sdpa's output has another memory layout than the ONNX exporter assumes (torch 2.13)
    has_bias = getattr(model.config, "position_embedding_type", None) == "relative"
    model.set_attn_implementation("eager" if has_bias else "sdpa")
    shapes: dict[int, Any] = {0: Dim("batch", min=1)}
    if size == _DYNAMIC:
        shapes |= _free_sizes(model.config)
    elif size is not None:
        # raises for a size that the patches do not divide, and for any text other than "dynamic"
        model.set_image_size(size)  # pyright: ignore[reportArgumentType]
    # a batch of two, because torch.export treats the sizes 0 and 1 as constants
    height, width = as_pair(model.config.image_size)
    pixel_values = torch.zeros(2, model.config.num_channels, height, width, dtype=model.dtype)
    return _Outputs(model, names, scaling).eval(), pixel_values, {"pixel_values": shapes}


def _free_sizes(config: HfViTConfig | HfBiTConfig) -> dict[int, Any]:
    if isinstance(config, HfBiTConfig):
        if config.padding == "same":
            raise ConversionError("cannot export a dynamic size: 'SAME' padding depends on the image size; pass a size")
        limits = {"min": config.stride + 1, "max": _MAX_PATCHES * config.stride}  # at least two rows and columns
        return {2: Dim("height", **limits), 3: Dim("width", **limits)}
    rows, columns = (patch * config.stride for patch in as_pair(config.patch_size))
    if config.position_embedding_type == "sincos2d":
        raise ConversionError(
            "cannot export a dynamic size: sine-cosine positions are computed outside the program; pass a size"
        )
    return {
        2: rows * Dim("rows", min=2, max=_MAX_PATCHES),
        3: columns * Dim("columns", min=2, max=_MAX_PATCHES),
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' messages: their own deprecations, and hints about torchvision, which is not needed."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
