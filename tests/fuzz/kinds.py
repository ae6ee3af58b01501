"""Every kind of input."""

from .checkpoints import Npz, Pth, Safetensors, Weights
from .gate import Kind
from .pictures import Objects, Pictures
from .texts import Configuration, Index, LabelMap, Labels, Processor, Recipe

KINDS: tuple[Kind, ...] = (
    Npz(),
    Pth(),
    Safetensors(),
    Weights(),
    Configuration(),
    Processor(),
    Pictures(),
    Objects(),
    Recipe(),
    Index(),
    Labels(),
    LabelMap(),
)
