"""Which backend computes a model."""

from collections.abc import Iterable
from typing import Any

from transformers.utils import logging

from ..models.configuration_hf_vision import as_pair
from ..models.pretrained import HfVisionPreTrainedModel
from .forward import BackendForward
from .runtimes import RUNTIMES

logger = logging.get_logger(__name__)

BACKENDS = ("auto", "torch", *RUNTIMES)
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
        backend = choose(model)
        logger.info(f"the backend is {backend}")
    if backend == "torch":
        return model.optimize_for_inference(batch_size)
    if problem := why_not(model, backend):
        raise ValueError(f"{backend} cannot compute this model: {problem}")
    RUNTIMES[backend].module()
    model.train().eval()  # takes back what was there
    model.forward = BackendForward(model, backend)
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


def choose(model: Any) -> str:
    """The fastest backend that is installed and computes this model, by rule.

    OpenVINO was at least as fast as the others in every measured case; then ONNX Runtime in float32; then torch.
    """
    for name in ("openvino", "onnxruntime"):
        if RUNTIMES[name].is_installed and why_not(model, name) is None:
            return name
    return "torch"
