"""Models that another library computes: OpenVINO, ONNX Runtime, and int8 programs of OpenVINO.

Each is an object with the attributes and the forward of a model, for one image size. A call that its program cannot
compute raises a ValueError; nothing is computed by PyTorch instead.
"""

from .int8 import Int8Model
from .program_model import ONNXRuntimeModel, OpenVINOModel, ProgramModel

__all__ = ["Int8Model", "ONNXRuntimeModel", "OpenVINOModel", "ProgramModel"]
