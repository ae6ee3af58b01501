"""Which backend computes a model."""

from collections.abc import Iterable
from typing import Any

import torch
from transformers.utils import logging

from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vision import as_pair
from ..models.pretrained import HfVisionPreTrainedModel
from .forward import BackendForward
from .runtimes import RUNTIMES

logger = logging.get_logger(__name__)

BACKENDS = ("auto", "torch", *RUNTIMES)
_WIDE, _MANY = 768, 8  # hidden_size of a B/16, and images, from which `choose` prefers another backend in bfloat16
_SUFFIXES = ("Model", "ForImageClassification")  # of the classes whose forward is a function of the pixels


def use_backend(model: Any, backend: str, batch_size: int = 1) -> Any:
    """Let a backend compute the forwards of a model from now on; see `optimize_for_inference`.

    Returns:
        The model itself, in evaluation mode.

    Raises:
        ImportError: the backend's extra is not installed.
        ValueError: there is no such backend, or it cannot compute this model.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r} (expected one of {', '.join(BACKENDS)})")
    if backend == "auto":
        backend = choose(model, batch_size)
        logger.info(f"the backend is {backend}")
    if backend == "torch":
        return model.optimize_for_inference(batch_size)
    if problem := why_not(model, backend):
        raise ValueError(f"{backend} cannot compute this model: {problem}")
    RUNTIMES[backend].module()
    model.train().eval()  # takes back what was there
    model.forward = BackendForward(model, backend, batch_size)
    model.forward.prepare(as_pair(model.config.image_size))
    return model


def why_not(model: Any, backend: str) -> str | None:
    """Why a backend cannot compute a model, in words; None where it can."""
    name = type(model).__name__
    if not isinstance(model, HfVisionPreTrainedModel):
        return f"its class {name} is not the installed one (load it with hf_vit.load)"
    if not name.endswith(_SUFFIXES):
        return f"{name} has no program (expected an encoder or a classifier)"
    dtypes = RUNTIMES[backend].dtypes
    if model.dtype not in dtypes or model.device.type != "cpu":
        return f"it is in {model.dtype} on {model.device} (expected {_or(dtypes)} on the CPU)"
    return None


def _or(values: Iterable[Any]) -> str:
    return " or ".join(map(str, values))


def choose(model: Any, batch_size: int = 1) -> str:
    """The fastest backend that is installed and computes this model, by rule.

    Measured with two threads, time over that of torch's backend, on an AMD EPYC of family 26, and on an Intel Xeon of
    family 6, model 207 (AVX-512, no AMX); benchmarks/inference.py measures it:

        ============ ================ ================ =================
                     OpenVINO float32 ONNX R. float32  OpenVINO bfloat16
        B/16, 1      0.87, 0.87       0.94, 0.92       1.07, 1.17
        B/16, 8      0.91, 0.93       1.00, 1.00       0.98, not known
        S/16, 1      0.80, 0.90       0.84, 0.97       0.72, 1.05
        S/16, 8      0.74, 0.94       0.88, 1.05       0.84, 0.94
        ============ ================ ================ =================

    So in float32 OpenVINO comes first, then ONNX Runtime; in bfloat16 OpenVINO, but torch for wide models and few
    images. ResNets were not measured and stay with torch.
    """
    if isinstance(model.config, HfBiTConfig):
        return "torch"
    if model.dtype == torch.bfloat16 and model.config.hidden_size >= _WIDE and batch_size < _MANY:
        return "torch"
    for name in ("openvino", "onnxruntime"):
        if RUNTIMES[name].is_installed and why_not(model, name) is None:
            return name
    return "torch"
