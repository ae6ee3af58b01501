"""List of all sources, and the one that a checkpoint is of. A new source needs a file and a line here."""

import re
from collections.abc import Collection

from .checkpoint import TIMM_WRAPPER, Checkpoint
from .jax.checkpoints import Jax, JaxBiT
from .source import CONFIGURATIONS, ConvertOptions, KeyMapping, Source
from .tables import ConversionError
from .timm import Timm, TimmBit
from .torchvision import Torchvision
from .transformers import THEIR_MODELS, Transformers

SOURCES: tuple[Source, ...] = (
    Jax(),
    *map(JaxBiT, ("big_transfer", "bit_paper", "bit")),
    Transformers(),
    Timm(),
    TimmBit(),
    Torchvision(),
)

_ROOT = r"^(?:params/|opt/target/|0/)?"  # prefix before a signature
# (name of an array that only this kind of model has, or that a kind listed above also has; kind of model)
_MODELS = (
    (r"MixerBlock_\d+/", "an MLP-Mixer, which has no attention"),
    (r"embedding_[^/]+/kernel$", "UViM's first stage, a VQ-VAE"),
    (r"EmbedLabels/", "a GIVT, which generates images"),
    (r"(?:cnn_encoder|cnn_decoder|decoder_stem)/", "GIVT's VAE"),
    (r"EmbedPatches/", "UViM's second stage, an encoder-decoder model"),
    (r"(?:decoder/EncDecBlock|encoder/embedding/kernel$)", "a CapPa captioner, an image encoder with a text decoder"),
    (r"couplings/", "a Jet, a normalizing flow"),
    (r"Embed(?:Image|Text)/", "a JetFormer, which generates images and text"),
    (r"_vq_vae\.", "the VQ-VAE of PaliGemma's segmentation"),
    (r"(?:batch_stats/|bn_init/|init_bn/|(?:Bottleneck)?ResNetBlock_\d+/)", "a ResNet with batch normalization"),
)
# The same, for files without an image tower.
_TEXTS = (
    (r"(?:txt/|Embed_0/|Encoder_0/|BertEncoder_0/)", "a text tower without an image tower"),
    (r"(?:llm/|embedder/)", "a language model without an image tower"),
)


def recognize(checkpoint: Checkpoint, options: ConvertOptions) -> tuple[Source, KeyMapping]:
    """Find the source of a checkpoint from its content, and the naming of its arrays.

    Raises:
        ConversionError: no source matches, or it is an unsupported architecture of the original repositories.
    """
    what = _find(_MODELS, checkpoint.shapes)
    for source in SOURCES if what is None else ():
        if (naming := source.naming(checkpoint, options)) is not None:
            return source, naming
    if what is None and any(re.search("embeddings[./]patch_embeddings", name) for name in checkpoint.shapes):
        what = "transformers' parameter names (pass the folder that also contains config.json)"
    model_type = checkpoint.settings.get("model_type")
    check_model_type("it", model_type)
    if model_type in CONFIGURATIONS:
        what = f"a model of type {model_type}, for hf_vit.load"
    what = what or _find(_TEXTS, checkpoint.shapes)
    what = what or f"an unknown architecture (arrays such as {', '.join(sorted(checkpoint.shapes)[:3])})"
    raise ConversionError(f"it holds {what}; hf_vit converts ViT, its hybrids and BiT")


def check_model_type(name: str, model_type: str | None) -> None:
    """Raise ConversionError if a config.json is of an architecture of transformers that hf_vit does not convert."""
    if model_type not in (None, *CONFIGURATIONS, *THEIR_MODELS, TIMM_WRAPPER):
        raise ConversionError(
            f"{name} holds a model of type {model_type} of transformers; hf_vit converts {', '.join(THEIR_MODELS)}, "
            "and the ViT, its hybrids and BiT of timm, torchvision and the original code"
        )


def _find(signatures: tuple[tuple[str, str], ...], names: Collection[str]) -> str | None:
    return next((what for sign, what in signatures if any(re.match(_ROOT + sign, name) for name in names)), None)
