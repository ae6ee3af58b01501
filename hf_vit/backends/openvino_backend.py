"""Programs of OpenVINO.

A converted program takes any batch. It is compiled for the usual batch, and again for any batch when another one comes.
The former was 1 to 4 % faster on two cores of an AVX-512 CPU (S/16, batch 1 and 8).
"""

import threading
from functools import cache
from pathlib import Path
from typing import Any

import openvino
import torch

from ..conversion.programs import make_openvino

_FILE = "program.xml"
_PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16"}


def convert(model: Any, size: tuple[int, int], names: list[str], folder: Path) -> None:
    """Write the program as OpenVINO's own files; see `_Module` in runtimes.py."""
    make_openvino(model, size, folder / _FILE, names)


def load(folder: Path, dtype: torch.dtype, threads: int, batch: int | None = None) -> "_Program":
    """Compile the program for this CPU; see `_Module` in runtimes.py."""
    settings = {
        "INFERENCE_PRECISION_HINT": _PRECISIONS[dtype],  # the default is bfloat16, where the CPU has it
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
    }
    program = read_program(folder / _FILE)
    if batch is not None:
        shape = program.input(0).partial_shape
        shape[0] = batch
        program.reshape(shape)
    return _Program(_core().compile_model(program, "CPU", settings))


def read_program(file: Path) -> Any:
    """Read a program into memory: its files may be replaced while it is in use."""
    return _core().read_model(file)


@cache
def _core() -> Any:
    """Return the OpenVINO of this process, which lives until the process ends.

    The CPU plugin of each `Core` sets an alternate stack for signals of the calling thread, and restores the one before
    it when the last use of that `Core` ends. After two of them end in the order in which they began, the thread has a
    stack that is unmapped: the next signal with a handler ends the process. `DataLoader` handles SIGCHLD, for example.
    """
    core = openvino.Core()
    core.set_property({"ENABLE_MMAP": False})
    return core


class _Program:
    """Compiled program with an inference request for each thread that calls it."""

    def __init__(self, compiled: Any):
        self._compiled = compiled
        self._requests = threading.local()

    def __call__(self, pixel_values: torch.Tensor) -> list[torch.Tensor]:
        request = getattr(self._requests, "request", None)
        if request is None:
            request = self._requests.request = self._compiled.create_infer_request()
        request.set_input_tensor(openvino.Tensor(pixel_values.numpy(), shared_memory=True))
        request.infer()
        # a copy, since the next call reuses this memory
        return [torch.from_numpy(output.data).clone() for output in request.output_tensors]
