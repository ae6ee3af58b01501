"""Unsupported architectures of the original repositories, recognised by the names of their arrays."""

import re
from collections.abc import Collection
from pathlib import Path

_HDF5 = b"\x89HDF\r\n\x1a\n"
_ROOT = r"^(?:params/|opt/target/)?"  # prefix before a signature
# (name of an array that only this kind of model has, or that a kind listed above also has; kind of model)
_MODELS = (
    (r"MixerBlock_\d+/", "an MLP-Mixer, which has no attention"),
    (r"embedding_[^/]+/kernel$", "UViM's first stage, a VQ-VAE"),
    (r"EmbedLabels/", "a GIVT, which generates images"),
    (r"(?:cnn_encoder|cnn_decoder|decoder_stem)/", "a VAE of GIVT"),
    (r"EmbedPatches/", "UViM's second stage, an encoder with a decoder"),
    (r"(?:decoder/EncDecBlock|encoder/embedding/kernel$)", "a CapPa captioner, an encoder with a decoder of text"),
    (r"couplings/", "a Jet, a normalising flow"),
    (r"Embed(?:Image|Text)/", "a JetFormer, which generates images and text"),
    (r"_vq_vae\.", "the VQ-VAE of PaliGemma's segmentation"),
    (r"(?:batch_stats/|bn_init/|init_bn/|(?:Bottleneck)?ResNetBlock_\d+/)", "a ResNet with batch normalisation"),
)
# The same, for files without an image tower.
_TEXTS = (
    (r"(?:txt/|Embed_0/|Encoder_0/|BertEncoder_0/)", "a text tower without an image tower"),
    (r"(?:llm/|embedder/)", "a language model without an image tower"),
)


def other_model(names: Collection[str]) -> str | None:
    """Return the kind of an unsupported architecture of the original repositories; None for any other checkpoint."""
    return _first(_MODELS, names)


def unknown_model(names: Collection[str]) -> str:
    """Describe a checkpoint that no source can read."""
    if any(re.search("embeddings[./]patch_embeddings", name) for name in names):
        return "the names of transformers (give the folder that also holds its config.json)"
    return _first(_TEXTS, names) or f"an unknown architecture (arrays such as {', '.join(sorted(names)[:3])})"


def _first(signatures: tuple[tuple[str, str], ...], names: Collection[str]) -> str | None:
    return next((what for sign, what in signatures if any(re.match(_ROOT + sign, name) for name in names)), None)


def keras_model(path: Path) -> str | None:
    """Describe a Keras model, and name the released file to convert instead; return None for any other path."""
    if path.is_dir():
        name = path.parent.name if path.name == "tfhub" else path.name.removesuffix("tfhub").rstrip(".-_")
        is_keras, what = (path / "saved_model.pb").is_file(), "a SavedModel of TensorFlow"
    else:
        with open(path, "rb") as file:
            is_keras, what, name = file.read(8) == _HDF5, "a Keras model in HDF5", path.stem
    return f"{path.name} is {what}, which hf_vit does not read; convert {name}.npz instead" if is_keras else None
