"""Dialects of the original JAX checkpoints: their names for the arrays of the rules (`table`).

If a file also holds a text tower or a language model, the head of the image tower is a projection to an embedding.

In a released vit_jax file, the modules of a block are numbered by position (LayerNorm_0,
MultiHeadDotProductAttention_1, LayerNorm_2, MlpBlock_3). Present-day Flax (and big_vision) numbers them per class.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ...models.configuration_hf_vision import MAX_LAYERS
from ..source import StoredArray
from ..tables import ConversionError
from .tables import POSITIONS


class Dialect(NamedTuple):
    """Dialect of a file.

    names: "vit_jax" (released), "flax" (present-day numbering) or "big_vision" (as flax, positions at the root).
    prefix: prefix of every name: "", "params/", "params/img/", "opt/target/" ...
    stacked: arrays of all blocks are stacked, with a leading axis over depth.
    """

    names: str
    prefix: str = ""
    stacked: bool = False


_PREFIXES = ("params/img/", "opt/target/img/", "img/", "params/", "opt/target/", "")
TOWER = "img/"
_HEAD, _PROJECTION = "head/", "projection/"  # two names in the rules for the same name in files
_OTHER_TOWERS = {"txt", "t", "llm"}  # other parts of a file with an image tower: text, temperature, language model
_PER_CLASS = {
    "LayerNorm_1": "LayerNorm_2",
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "MlpBlock_0": "MlpBlock_3",
}
_INLINED_MAP_HEAD = ("probe", "MlpBlock_0/", "MultiHeadDotProductAttention_0/", "LayerNorm_0/")
_PATCH_KERNEL = "embedding/kernel"
_STACKED = "Transformer/encoderblock/"


def recognise(shapes: Mapping[str, tuple[int, ...]], file: str) -> tuple[Dialect, dict[str, StoredArray]] | None:
    """Translate the names of a file to those of the rules.

    Args:
        shapes: name in the file -> shape.
        file: name of the file, for messages.

    Returns:
        The dialect, and name in the rules -> place, without the arrays of other parts (optimiser, text tower); None for
        a file without a ViT.

    Raises:
        ConversionError: stacked blocks have several depths, or more than the maximum.
    """
    prefix = _prefix_of(shapes)
    if prefix is None:
        return None
    depths = {shape[0] for name, shape in shapes.items() if name.startswith(prefix + _STACKED) and shape}
    if len(depths) > 1:
        raise ConversionError(f"{file} has stacked blocks of several depths: {', '.join(map(str, sorted(depths)))}")
    if depths and max(depths) > MAX_LAYERS:  # before names are made for each
        raise ConversionError(f"{file} has {max(depths):,} stacked blocks; at most {MAX_LAYERS:,} are read")
    own = [name.removeprefix(prefix) for name in shapes if name.startswith(prefix)]
    arrays = {
        canonical: StoredArray(prefix + name, index)
        for name in own
        for canonical, index in _canonical(name, max(depths, default=None))
    }
    if prefix.endswith(TOWER) and not _OTHER_TOWERS.isdisjoint(names_beside(shapes, prefix)):
        arrays = {_renamed(name, _HEAD, _PROJECTION): stored for name, stored in arrays.items()}
    per_class = any(re.match(r"Transformer/encoderblock(_\d+)?/MlpBlock_0/", name) for name in own)
    is_big_vision = depths or {"pos_embedding", "Transformer/pos_embedding", "MAPHead_0/probe", "probe"} & set(own)
    if is_big_vision or (per_class and POSITIONS not in arrays):
        return Dialect("big_vision", prefix, bool(depths)), arrays
    return Dialect("flax" if per_class else "vit_jax", prefix), arrays


def _prefix_of(names: Collection[str]) -> str | None:
    return next((prefix for prefix in _PREFIXES if prefix + _PATCH_KERNEL in names), None)


def has_patch_vectors(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether patches are vectors (NaFlex): the patch embedding is a matrix, positions are (rows, columns, D)."""
    prefix = _prefix_of(shapes)
    return prefix is not None and len(shapes[prefix + _PATCH_KERNEL]) == 2


def grid_of_patch_vectors(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int] | None:
    """Return (rows, columns) of the positions if patches are vectors; None for any other file."""
    positions = shapes.get(f"{_prefix_of(shapes)}pos_embedding", ()) if has_patch_vectors(shapes) else ()
    return positions[:2] if len(positions) == 3 else None


def names_beside(names: Iterable[str], prefix: str) -> list[str]:
    """List the other parts of a file, by the first component of their names after the prefix of both towers."""
    root = prefix.removesuffix(TOWER)
    return sorted({name.removeprefix(root).split("/")[0] for name in names if not name.startswith(prefix)})


def has_language_model(names: Iterable[str]) -> bool:
    """Tell whether the file also holds a language model (PaliGemma)."""
    beginnings = tuple(prefix.replace(TOWER, "llm/") for prefix in _PREFIXES if prefix.endswith(TOWER))
    return any(name.startswith(beginnings) for name in names)


def _renamed(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _canonical(name: str, depth: int | None) -> list[tuple[str, int | None]]:
    if name in ("pos_embedding", "Transformer/pos_embedding"):
        return [(POSITIONS, None)]
    if name.startswith(_INLINED_MAP_HEAD):
        return [(f"MAPHead_0/{name}", None)]
    match = re.match(r"Transformer/encoderblock(_\d+)?/([^/]+)(/.*)", name)
    if match is None:
        return [(name, None)]
    number, module, rest = match.groups()
    module = _PER_CLASS.get(module, module)
    if number is None and depth is not None:
        return [(f"Transformer/encoderblock_{index}/{module}{rest}", index) for index in range(depth)]
    return [(f"Transformer/encoderblock{number}/{module}{rest}", None)]


def dialect_name(canonical: str, dialect: Dialect) -> str:
    """Return a dialect's name for an array of the rules (for a single block, even if the dialect stacks them)."""
    canonical = _renamed(canonical, _PROJECTION, _HEAD)
    if dialect.names == "vit_jax":
        return dialect.prefix + canonical
    if dialect.names == "big_vision" and canonical == POSITIONS:
        return f"{dialect.prefix}pos_embedding"
    for per_class, released in _PER_CLASS.items():
        if canonical.startswith("Transformer/encoderblock"):
            canonical = canonical.replace(f"/{released}/", f"/{per_class}/")
    return dialect.prefix + canonical
