"""Runtimes of the benchmarks: OpenVINO and ONNX Runtime without hf_vit, on the ONNX export of the same weights.

They do not use `hf_vit.backends`, so that a comparison shows its overhead or gain. Each gets the latency setting, the
shape of the images and the number of threads when it is loaded. Inputs are not copied.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contestants import LOADERS, NotThere

RUNTIMES = ("OpenVINO", "ONNX Runtime")
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


def load(name: str, folder: Path, dtype: str, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Return a function from images (batch, 3, height, width), a float32 array, to logits."""
    if name == "ONNX Runtime" and dtype != "float32":
        raise NotThere(f"no kernels for {dtype} on a CPU")
    return (_load_openvino if name == "OpenVINO" else _load_onnxruntime)(_export(folder), dtype, shape)


def _export(folder: Path) -> Path:
    from hf_vit.conversion import export_onnx

    path = folder / "program.onnx"
    if not path.exists():
        model: Any = LOADERS["hf_vit"](folder, torch.float32)
        export_onnx(model, path)
    return path


def _load_openvino(path: Path, dtype: str, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    model.reshape(list(shape))
    settings = {
        "INFERENCE_PRECISION_HINT": _PRECISIONS[dtype],
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    request = core.compile_model(model, "CPU", settings).create_infer_request()

    def forward(pixel_values: Any) -> Any:
        request.set_input_tensor(openvino.Tensor(pixel_values, shared_memory=True))
        request.infer()
        return np.array(request.get_output_tensor().data)

    return forward


def _load_onnxruntime(path: Path, dtype: str, shape: tuple[int, ...]) -> Callable[[Any], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda pixel_values: session.run(None, {"pixel_values": pixel_values})[0]
