"""Choice of the backend of a model."""

from importlib.util import find_spec
from typing import Any

import torch
from transformers.utils import logging

from ..files.messages import check_choice
from ..models.configuration_hf_bit import HfBiTConfig
from .int8 import Int8Model
from .program_model import ONNXRuntimeModel, OpenVINOModel, ProgramModel
from .programs import PROGRAM_MODELS

logger = logging.get_logger(__name__)

_PROGRAM_MODELS = {"openvino": OpenVINOModel, "onnxruntime": ONNXRuntimeModel}
BACKENDS = ("auto", "eager", "torch", *_PROGRAM_MODELS, "int8")
_WIDE, _MANY = 768, 8  # in bfloat16, `choose` takes torch from this hidden_size on, for fewer images than this


def make_backend(model: Any, backend: str, batch_size: int = 1, **where: Any) -> Any:
    """Return a model that computes the same through a backend; see `hf_vit.use_backend`."""
    check_choice("backend", backend, BACKENDS)
    if isinstance(model, ProgramModel) and backend not in ("auto", "eager"):
        raise ValueError(f"the model is a {type(model).__name__}, a program already; omit backend {backend}")
    if isinstance(model, ProgramModel):
        return model
    if backend == "auto":
        backend = choose(model, batch_size)
        logger.info(f"the backend is {backend}")
    if backend == "eager":
        return model
    if backend == "torch":
        return model.optimize_for_inference(batch_size)
    if backend == "int8":
        return Int8Model(model, model.name_or_path, **where)
    return _PROGRAM_MODELS[backend](model, batch_size)


def choose(model: Any, batch_size: int = 1) -> str:
    """Choose the fastest backend that is installed and supports this model, by a fixed rule.

    The rule is from these times relative to torch's backend, with two threads, on an AMD EPYC of family 26 and an
    Intel Xeon of family 6, model 207 (AVX-512, no AMX), measured by benchmarks/inference.py:

        ============ ================ ================ =================
                     OpenVINO float32 ONNX R. float32  OpenVINO bfloat16
        B/16, 1      0.87, 0.87       0.94, 0.92       1.07, 1.17
        B/16, 8      0.91, 0.93       1.00, 1.00       0.98, not known
        S/16, 1      0.80, 0.90       0.84, 0.97       0.72, 1.05
        S/16, 8      0.74, 0.94       0.88, 1.05       0.84, 0.94
        ============ ================ ================ =================

    In float32 it prefers OpenVINO, then ONNX Runtime; in bfloat16 OpenVINO, but torch for wide models and few images.
    ResNets were not measured and use torch.
    """
    if isinstance(model.config, HfBiTConfig) or not isinstance(model, PROGRAM_MODELS) or model.device.type != "cpu":
        return "torch"
    if model.dtype == torch.bfloat16 and model.config.hidden_size >= _WIDE and batch_size < _MANY:
        return "torch"
    for name, model_class in _PROGRAM_MODELS.items():
        if find_spec(name) is not None and model.dtype in model_class.dtypes:
            return name
    return "torch"
