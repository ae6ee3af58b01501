"""Models that another library computes: OpenVINO, ONNX Runtime, and int8 programs of OpenVINO; and their export.

Each model is an object with the attributes and the forward of a model, for one image size. A call that its program
cannot compute raises a ValueError; nothing is computed by PyTorch instead. The names are imported at their first use,
because `runner` needs neither them nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors; the same names as in `_HOME`
    from .int8 import Int8Model as Int8Model
    from .program_model import ONNXRuntimeModel as ONNXRuntimeModel
    from .program_model import OpenVINOModel as OpenVINOModel
    from .program_model import ProgramModel as ProgramModel

_HOME = {
    "Int8Model": ".int8",
    "ONNXRuntimeModel": ".program_model",
    "OpenVINOModel": ".program_model",
    "ProgramModel": ".program_model",
}
__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name], __name__), name)
