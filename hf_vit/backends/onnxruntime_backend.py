"""Programs of ONNX Runtime, for any batch."""

from pathlib import Path
from typing import Any

import onnxruntime
import torch

from ..conversion.programs import make_onnx, require

_FILE = "program.onnx"
_MOST_IN_ONE_FILE = 2**31 - 2**24  # bytes of weights; the graph needs the rest of 2 GiB
_ERRORS = 3  # log level


def convert(model: Any, size: tuple[int, int], names: list[str], folder: Path) -> None:
    """Write the program as ONNX; see `_Module` in runtimes.py."""
    require("onnx", "onnxscript", extra="onnxruntime")
    program = make_onnx(model, size, names)
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    program.save(folder / _FILE, external_data=weights > _MOST_IN_ONE_FILE)


def load(folder: Path, dtype: torch.dtype, threads: int, batch: int | None = None) -> "_Program":
    """Optimise the program for this CPU; see `_Module` in runtimes.py."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _ERRORS
    return _Program(onnxruntime.InferenceSession(folder / _FILE, options, providers=["CPUExecutionProvider"]))


class _Program:
    def __init__(self, session: Any):
        self._session = session

    def __call__(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        return [torch.from_numpy(output) for output in self._session.run(None, {"pixel_values": pixel_values.numpy()})]
