"""Models that compute in int8, from folders of `hf-vit quantize`.

Besides the files of `save_pretrained`, such a folder has `program.xml` and `program.bin` (OpenVINO's) and
`quantization.json`: how it was made, the sha256 of the program's files, the fingerprint of the float32 model, and for
every layer in int8 the range of its inputs.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization
from transformers.modeling_outputs import ImageClassifierOutput

from ..files.fingerprint import fingerprint_weights
from ..files.manifest import sha256_of
from ..files.model_files import find_file
from ..files.reading import read_json_object
from ..files.versions import require
from ..models.modeling_hf_vit_variants import HfViTForImageClassification
from ..models.pretrained import QUANTIZATION_RECORD
from ..models.sizes import as_pair
from .program_model import OpenVINOProgram, ProgramModel, read_openvino
from .programs import Scaling, make_onnx

PROGRAM_FILES = ("program.xml", "program.bin")
FORMAT = "hf_vit int8, version 2"
_STEPS = 255  # steps between the smallest and the largest input
_LARGEST_WEIGHT = 63.5  # half of the range of 8 bits: see quantization.py


class Int8Model(ProgramModel):
    """A classifier that OpenVINO computes in int8, for images of one size; `hf_vit.load` returns it for such a folder.

    Args:
        model: the float32 model of the same folder, on the CPU.
        folder: folder of `hf-vit quantize`, or a name on the Hub.
        where: arguments of `from_pretrained` that locate files, such as `revision`.

    Raises:
        ImportError: OpenVINO is not installed.
        ValueError: a file is missing, damaged or of another model; or the model has another size, dtype or device.
    """

    def __init__(self, model: Any, folder: str | os.PathLike, **where: Any):
        require("openvino")
        local, record = _read(folder, where)
        found = (list(as_pair(model.config.image_size)), model.dtype, model.device.type)
        expected = (record.get("image_size"), torch.float32, "cpu")
        if found != expected:
            asked = f"image_size, dtype and device of the model are {found}"
            raise ValueError(f"{asked}, but the int8 program of {folder} has {expected}; {_OTHERWISE}")
        if fingerprint_weights(model) != record.get("model"):
            raise ValueError(f"the weights or config.json of {folder} are not those of its program; {_OTHERWISE}")
        try:
            program = OpenVINOProgram(read_openvino(local / PROGRAM_FILES[0]), torch.float32)
        except RuntimeError as error:
            raise ValueError(f"cannot load the int8 program of {folder} with this OpenVINO: {error}") from error
        super().__init__(model, ImageClassifierOutput, ["logits"], program, str(record["model"]))
        self.record, self._folder = record, local

    def write_program(self, file: Path, image_size: tuple[int, int], scaling: Scaling) -> None:
        """Write the int8 program with the normalization of its input, as ONNX (.onnx) or OpenVINO's files (.xml).

        Args:
            image_size: expected size of the program.
            scaling: (scale, offset), (channels, 1, 1) each: the program first computes x * scale + offset.

        Raises:
            ValueError: the program is for another size.
            ImportError: a package is missing.
        """
        expected = as_pair(self.config.image_size)
        if image_size != expected:
            raise ValueError(f"the image size is {image_size}, but the int8 program is for {expected}; quantize again")
        if file.suffix == ".onnx":
            model = HfViTForImageClassification.from_pretrained(self._folder, config=self.config)
            try:
                insert_quantization(model, self.record["layers"])
            except Exception as error:
                raise ValueError(f"cannot use the layers in {self._folder / QUANTIZATION_RECORD}: {error}") from error
            make_onnx(model, scaling=scaling).save(file)
            return
        import openvino
        from openvino import opset15 as operators

        program = read_openvino(self._folder / PROGRAM_FILES[0])
        (old,) = program.get_parameters()
        levels = operators.parameter(old.get_partial_shape(), openvino.Type.f32, name="pixel_values")
        levels.output(0).set_names({"pixel_values"})
        scale, offset = (operators.constant(value.float().numpy()) for value in scaling)
        normalized = operators.add(operators.multiply(levels, scale), offset)
        for user in old.output(0).get_target_inputs():
            user.replace_source_output(normalized.output(0))
        program.add_parameters([levels])
        program.remove_parameter(old)
        program.validate_nodes_and_infer_types()
        openvino.save_model(program, file, compress_to_fp16=False)


_OTHERWISE = 'load it with backend="torch" (--backend torch) for float32'


def _read(folder: str | os.PathLike, where: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the local folder and the record of an int8 program whose files are whole."""
    file = find_file(folder, QUANTIZATION_RECORD, where)
    record = {} if file is None else read_json_object(file)
    files = record.get("files")
    if record.get("format") != FORMAT or not isinstance(files, dict):
        raise ValueError(f"{folder} has no {QUANTIZATION_RECORD} of {FORMAT!r}; use hf-vit quantize, or {_OTHERWISE}")
    for name in PROGRAM_FILES:
        file = find_file(folder, name, where)
        if file is None or sha256_of(file) != files.get(name):
            raise ValueError(f"{name} of {folder} is missing or damaged; quantize the model again, or {_OTHERWISE}")
    return Path(str(file)).parent, record


class _Int8Weight(nn.Module):
    """Weight of a linear layer or a convolution, symmetric in 8 bits with a scale for each output channel."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        scale = weight.abs().flatten(1).amax(dim=1).clamp(min=1e-12) / _LARGEST_WEIGHT
        levels = (weight / scale.view(-1, *[1] * (weight.ndim - 1))).round().to(torch.int8)
        self.levels, self.scale = nn.Buffer(levels), nn.Buffer(scale)
        self.zero = nn.Buffer(torch.zeros_like(scale, dtype=torch.int8))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        terms = (self.levels, self.scale, self.zero)
        return torch.onnx.ops.symbolic("DequantizeLinear", terms, {"axis": 0}, dtype=torch.float32, shape=weight.shape)


class _Int8Input(nn.Module):
    """Rounding of a layer's input to 256 levels between `low` and `high`, as by NNCF's FakeQuantize."""

    def __init__(self, low: float, high: float):
        super().__init__()
        scale = torch.tensor((high - low) / _STEPS)
        self.scale, self.zero = nn.Buffer(scale), nn.Buffer((-low / scale).round().to(torch.uint8))

    def forward(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        first, *others = inputs
        terms = (self.scale, self.zero)
        levels = torch.onnx.ops.symbolic("QuantizeLinear", (first, *terms), dtype=torch.uint8, shape=first.shape)
        first = torch.onnx.ops.symbolic("DequantizeLinear", (levels, *terms), dtype=first.dtype, shape=first.shape)
        return first, *others


def insert_quantization(model: nn.Module, ranges: dict[str, list[float]]) -> None:
    """Let layers of a float32 model multiply in 8 bits, for the export to ONNX.

    Inputs and weights get pairs of QuantizeLinear and DequantizeLinear, which the runtimes fuse with the products.

    Args:
        ranges: smallest and largest input of each layer, by name.
    """
    for name, (low, high) in ranges.items():
        layer: Any = model.get_submodule(name)
        register_parametrization(layer, "weight", _Int8Weight(layer.weight.detach()), unsafe=True)
        layer.input_quantizer = _Int8Input(low, high)  # a submodule, whose buffers are exported
        layer.register_forward_pre_hook(layer.input_quantizer)
