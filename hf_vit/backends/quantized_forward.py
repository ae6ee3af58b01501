"""Loading of folders of `hf-vit quantize`, whose int8 program computes the model's forwards.

Besides the files of `save_pretrained`, such a folder has `program.xml` and `program.bin` (OpenVINO's) and
`quantization.json`, with the settings of the quantisation, the sha256 of its files, and the identity of the model. With
the float32 weights, torch computes the calls that the program cannot.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_outputs import ImageClassifierOutput

from ..files.download import sha256_of
from ..files.reading import read_json_object
from .forward import NAMES_ALONE, BackendForward, Fitted
from .runtimes import RUNTIMES, Program
from .watching import Watched

RECORD, FILES = "quantization.json", ("program.xml", "program.bin")
FORMAT = "hf_vit int8, version 1"
_OF_LOADING = ("dtype", "torch_dtype", *NAMES_ALONE)


def use_quantized(model: Any, files: dict[str, str | os.PathLike | None]) -> Any:
    """Compute the forwards of a model with its saved int8 program; `hf_vit.load` calls this for such a folder.

    Args:
        model: the model of the same folder, in float32 on the CPU.
        files: paths of quantization.json, program.xml and program.bin, by name, in one folder.

    Returns:
        The model itself, in evaluation mode.

    Raises:
        ImportError: OpenVINO is not installed.
        ValueError: a file is missing, damaged or of another model; or the model has another dtype or device.
    """
    record, folder = _read(files)
    if model.dtype != torch.float32 or model.device.type != "cpu":
        refuse = f"the model is in {model.dtype} on {model.device} (expected float32 on the CPU)"
        raise ValueError(f"cannot use the int8 program of {folder}: {refuse}; load it with backend='torch'")
    model.train().eval()  # removes an earlier backend
    watched = Watched(model)
    if (found := identity_of(model, watched)) != record["model"]:
        raise ValueError(
            f"{folder} holds the int8 program of another model (identity {found[:16]}..., expected "
            f"{str(record['model'])[:16]}...): the weights or config.json were changed; quantise it again"
        )
    model.forward = QuantizedForward(model, _load(folder), record, folder)
    model.forward.know(watched, found)
    return model


def _read(files: dict[str, str | os.PathLike | None]) -> tuple[dict[str, Any], Path]:
    """Read the record of a folder, and check the files of its program."""
    folder = Path(str(files[RECORD])).parent
    record = read_json_object(folder / RECORD)
    sums = record.get("files")
    if record.get("format") != FORMAT or not isinstance(sums, dict) or not isinstance(record.get("model"), str):
        raise ValueError(f"{folder / RECORD} is not a record of hf-vit quantize (expected format {FORMAT!r})")
    for name in FILES:
        if files.get(name) is None:
            raise ValueError(f"{folder} has {RECORD} but no {name}; quantise it again, or load it with backend='torch'")
        if (found := sha256_of(folder / name)) != sums.get(name):
            raise ValueError(
                f"{folder / name} is damaged or of another folder: sha256 {found[:16]}..., expected "
                f"{str(sums.get(name))[:16]}...; quantise it again, or load it with backend='torch'"
            )
    return record, folder


def _load(folder: Path) -> Program:
    runtime = RUNTIMES["openvino"].module()
    try:
        return runtime.load(folder, torch.float32, torch.get_num_threads())
    except RuntimeError as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[-1][:200]
        raise ValueError(f"cannot load the int8 program of {folder} with this OpenVINO: {reason}") from error


def identity_of(model: Any, watched: Watched) -> str:
    """Return the sha256 of a model's weights and settings, which does not depend on class names and loading."""
    digest = hashlib.sha256()
    for line in watched.describe_weights():
        digest.update(line.encode() + b"\n")
    settings = {
        name: value
        for name, value in model.config.to_diff_dict().items()
        if name not in _OF_LOADING and not name.startswith("_")
    }
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return digest.hexdigest()


class QuantizedForward(BackendForward):
    """Forward of a model through its int8 program, for images of one size and any batch.

    torch computes in float32 the calls that `BackendForward` leaves to it, other image sizes, and a model whose weights
    or settings have changed; with one warning for each reason.

    Args:
        model: the model that the program was made from, in evaluation mode.
        program: its int8 program.
        record: content of its quantization.json.
        folder: folder of the program, for copies.
    """

    def __init__(self, model: Any, program: Program, record: dict[str, Any], folder: Path):
        super().__init__(model, "openvino")
        self.name = "the int8 program"
        self.record, self._folder = record, folder
        self._size = tuple(record["image_size"])
        self._fitted = Fitted(program, ImageClassifierOutput, ["logits"], torch.float32)

    def know(self, watched: Watched, identity: str) -> None:
        """Take over an examined model, so that the first call need not examine it again."""
        self._watched, self._identity = watched, identity

    def __reduce__(self):
        return _load_again, (self.model, self.record, self._folder)

    def _identity_of(self, watched: Watched) -> str:
        return identity_of(self.model, watched)

    def _obstacle_of_call(self, named: dict[str, Any]) -> str | None:
        obstacle = super()._obstacle_of_call(named)
        if obstacle is not None:
            return obstacle
        shape = tuple(named["pixel_values"].shape[1:])
        expected = (self.model.config.num_channels, *self._size)
        return None if shape == expected else f"images of {shape[1]} x {shape[2]} pixels (expected {self._size})"

    def _obstacle_of_model(self) -> str | None:
        obstacle = super()._obstacle_of_model()
        if obstacle is None and self._identity != self.record["model"]:
            return "the weights or settings have changed since it was quantised"
        return obstacle

    def _program_for(self, pixel_values: torch.Tensor) -> Fitted:
        return self._fitted


def _load_again(model: Any, record: dict[str, Any], folder: Path) -> QuantizedForward:
    return QuantizedForward(model, _load(folder), record, folder)
