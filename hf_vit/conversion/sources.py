"""Every source that we read: a new one is a folder and a line here."""

import re

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
    """Find whose checkpoint it is, from its content, and how it names its arrays.

    Raises:
        ConversionError: nobody's that we know.
    """
    for source in SOURCES:
        if (naming := source.naming(checkpoint, request)) is not None:
            return source, naming
    file, what = checkpoint.path.name, _other(checkpoint)
    raise ConversionError(f"{file} holds {what}; hf_vit converts ViT, its hybrids and BiT")


def _other(checkpoint: Checkpoint) -> str:
    names = sorted(checkpoint.shapes)
    if any(re.search("embeddings[./]patch_embeddings", name) for name in names):
        return "the names of transformers (give the folder that holds its config.json too)"
    roots = {part for name in names for part in name.split("/")[:3]}
    if any(root.startswith("MixerBlock_") for root in roots):
        return "an MLP-Mixer"
    if "txt" in roots or "Embed_0" in roots:
        return "a text tower"
    return f"an unknown architecture (arrays such as {', '.join(names[:3])})"
