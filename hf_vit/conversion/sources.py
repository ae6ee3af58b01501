"""List of all sources. A new source needs a folder and a line here."""

from .checkpoint import Checkpoint
from .jax.source import Jax
from .jax_bit.source import BIG_TRANSFER, BIT, BIT_PAPER
from .rules import ConversionError
from .source import Naming, Request, Source
from .timm.source import Timm
from .timm_bit.source import TimmBit
from .torchvision.source import Torchvision
from .transformers.flax import FlaxTransformers
from .transformers.source import Transformers
from .unsupported import other_model, unknown_model

SOURCES: tuple[Source, ...] = (
    Jax(),
    BIG_TRANSFER,
    BIT_PAPER,
    BIT,
    Transformers(),
    FlaxTransformers(),
    Timm(),
    TimmBit(),
    Torchvision(),
)


def recognise(checkpoint: Checkpoint, request: Request) -> tuple[Source, Naming]:
    """Find the source of a checkpoint from its content, and the naming of its arrays.

    Raises:
        ConversionError: no source matches, or it is an unsupported architecture of the original repositories.
    """
    what = other_model(checkpoint.shapes)
    for source in SOURCES if what is None else ():
        if (naming := source.naming(checkpoint, request)) is not None:
            return source, naming
    what = what or unknown_model(checkpoint.shapes)
    raise ConversionError(f"{checkpoint.path.name} holds {what}; hf_vit converts ViT, its hybrids and BiT")
