"""Choice of the backend of a model."""

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
_WIDE, _MANY = 768, 8  # in bfloat16, `choose` takes torch from this hidden_size on, for fewer images than this
_SUFFIXES = ("Model", "ForImageClassification")  # classes whose forward depends on the pixels alone


def use_backend(model: Any, backend: str, batch_size: int = 1) -> Any:
    """Compute the forwards of a model with a backend from now on; see `optimize_for_inference`.

    Args:
        model: a model of this package.
        backend: "torch", "openvino", "onnxruntime", or "auto" for the fastest that is installed.
        batch_size: usual number of images of a forward.

    Returns:
        The model itself, in evaluation mode.

    Raises:
        ImportError: the backend's extra is not installed.
        ValueError: the backend is unknown, or cannot compute this model.

    Example:
        >>> import hf_vit
        >>> model, processor = hf_vit.load("folder")
        >>> model = hf_vit.use_backend(model, "torch")
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r} (expected one of {', '.join(BACKENDS)})")
    if backend == "auto":
        backend = choose(model, batch_size)
        logger.info(f"the backend is {backend}")
    if backend == "torch":
        return model.optimize_for_inference(batch_size)
    if problem := why_not(model, backend):
        raise ValueError(f"cannot compute this model with {backend}: {problem}")
    RUNTIMES[backend].module()
    model.train().eval()  # removes an earlier backend
    model.forward = BackendForward(model, backend, batch_size)
    model.forward.prepare(as_pair(model.config.image_size))
    return model


def why_not(model: Any, backend: str) -> str | None:
    """Return the reason why a backend cannot compute a model; None if it can."""
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
    """Choose the fastest backend that is installed and computes this model, by a fixed rule.

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
    if isinstance(model.config, HfBiTConfig):
        return "torch"
    if model.dtype == torch.bfloat16 and model.config.hidden_size >= _WIDE and batch_size < _MANY:
        return "torch"
    for name in ("openvino", "onnxruntime"):
        if RUNTIMES[name].is_installed and why_not(model, name) is None:
            return name
    return "torch"
