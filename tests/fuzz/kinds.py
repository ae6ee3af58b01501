"""Every kind of input."""

from .checkpoints import Npz, Pth, Safetensors, Weights
from .containers import Arrays, Folders, Msgpack
from .gate import Kind
from .pictures import Objects, Pictures
from .texts import Configuration, Index, LabelMap, Labels, Processor, Recipe

KINDS: tuple[Kind, ...] = (
    Npz(),
    Pth(),
    Safetensors(),
    Msgpack(),
    Arrays(),
    Folders(),
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
