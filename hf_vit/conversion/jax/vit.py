"""Source of the original's ViTs and hybrids: files of vit_jax, of present-day Flax and of big_vision."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...catalog import find_released
from ...catalog.class_names import BUILT_IN, built_in_class_names
from ...catalog.evaluation import preprocessing_of_flexivit, preset_of_vit, sizes_of_flexivit
from ...files.npz import write_npz
from ...models.configuration_hf_bit import ORIGINALS
from ...models.configuration_hf_vit import HfViTHybridConfig, Size, as_pair, stem_stride
from ...models.modeling_hf_vit import HfViTForImageClassification, HfViTModel
from ..checkpoint import Checkpoint
from ..source import (
    Fields,
    Inferred,
    JaxSource,
    Model,
    Naming,
    Request,
    Shapes,
    StoredArray,
    Writing,
    by,
    has_array,
    has_head,
    image_size_of,
    length_of,
    one_or_pair,
    other_numbers,
    record_of,
    variants_of_the_paper,
    with_class_row,
    with_reason,
)
from ..tables import ConversionError, Rule, count_units
from .names import (
    TOWER,
    Dialect,
    dialect_name,
    grid_of_patch_vectors,
    has_language_model,
    has_patch_vectors,
    names_beside,
    recognise,
)
from .tables import POSITIONS, vit_rules, with_flat_norms

_BLOCK = "Transformer/encoderblock_0"
_QUERY, _DENSE = f"{_BLOCK}/MultiHeadDotProductAttention_1/query/kernel", f"{_BLOCK}/MlpBlock_3/Dense_0/kernel"
_GROUP_NORM = re.compile(r"(^|/)(gn[^/]*|norm-pre-head)/scale$")
_STEM_NUMBERS = {name: value for name, value in ORIGINALS["bit"].items() if "eps" in name or "form" in name}


class Jax(JaxSource):
    """The original's ViTs and hybrids; all sizes are read from the arrays."""

    models = (HfViTModel, HfViTForImageClassification)
    dialects = ("vit_jax", "flax", "big_vision")
    head = ("head/kernel", "head/bias")
    rules = staticmethod(vit_rules)  # pyright: ignore[reportAssignmentType]
    axes = {  # noqa: RUF012
        **{"embedding/kernel": 4, _QUERY: 3, _DENSE: 2, POSITIONS: 3, "conv_root/kernel": 4},
        **{"pre_logits/kernel": 2, "head/kernel": 2, "projection/kernel": 2},
    }

    def naming(self, checkpoint: Checkpoint, request: Request) -> Naming | None:
        recognised = recognise(checkpoint.shapes, checkpoint.path.name)
        if recognised is None:
            return None
        dialect, arrays = recognised
        if dialect.names == "big_vision":
            arrays = with_class_row(checkpoint, arrays, "cls", POSITIONS, request.position_grid)
        beside = names_beside(checkpoint.shapes, dialect.prefix)
        described = dialect._asdict() | flat_norms(checkpoint, arrays)
        if has_patch_vectors(checkpoint.shapes):
            described, arrays = {**described, "patch_vectors": True}, as_convolution(checkpoint, arrays)
        return Naming(described, arrays, beside, _similarity(checkpoint, dialect.prefix))

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, request: Request) -> Fields:
        patch_rows, patch_columns, channels, hidden_size = shapes["embedding/kernel"]
        blocks = (re.match(r"Transformer/encoderblock_(\d+)/", name) for name in shapes)
        last_block = max((int(block[1]) for block in blocks if block), default=0)
        has_cls, has_positions = "cls" in shapes, POSITIONS in shapes
        kernel = f"the kernel of the patches is {by(shapes['embedding/kernel'])}"
        fields: Fields = {
            "patch_size": Inferred(one_or_pair(patch_rows, patch_columns), kernel),
            "num_channels": Inferred(channels, kernel),
            "hidden_size": Inferred(hidden_size, kernel),
            "num_hidden_layers": Inferred(last_block + 1, f"the last block is encoderblock_{last_block}"),
            "num_attention_heads": Inferred(shapes[_QUERY][1], f"the kernel of the queries is {by(shapes[_QUERY])}"),
            "intermediate_size": Inferred(shapes[_DENSE][1], f"the first kernel of the MLP is {by(shapes[_DENSE])}"),
            "pooling": _pooling(shapes, checkpoint),
            "use_cls_token": has_array("cls", shapes),
            "representation_size": length_of("pre_logits/kernel", shapes, 1),
        }
        if has_patch_vectors(checkpoint.shapes):
            fields["position_interpolation"] = Inferred("bilinear", "patches are vectors, as in NaFlex")
        stride = 1
        if "head/kernel" in shapes:
            fields["num_labels"] = length_of("head/kernel", shapes, 1)
        if "projection/kernel" in shapes:
            fields["projection_dim"] = length_of("projection/kernel", shapes, 1)
        if "conv_root/kernel" in shapes:
            depths = count_units(shapes, r"block(\d+)/unit(\d+)/", first=1)
            _, _, channels, width = shapes["conv_root/kernel"]
            root = f"the kernel of the ResNet's root is {by(shapes['conv_root/kernel'])}"
            fields["stem_depths"] = Inferred(depths, f"the ResNet has {len(depths)} stages, counted by their units")
            fields |= with_reason({"stem_width": width, "num_channels": channels}, root)
            stride = stem_stride(depths)
        grid = request.position_grid or grid_of_patch_vectors(checkpoint.shapes)
        num_patches = shapes[POSITIONS][1] - has_cls if has_positions else None
        pixels = patch_rows * stride, patch_columns * stride
        image_size = image_size_of(num_patches, pixels, grid, checkpoint.path.name, has_cls)
        if has_positions:
            image_size = _as_released(image_size, checkpoint.location)
        fields |= {"position_embedding_type": _positions(shapes), "image_size": image_size}
        rows, columns = (size // side for size, side in zip(as_pair(image_size.value), pixels, strict=True))
        return fields | flexible_fields(fields, (rows, columns), checkpoint, request.patch_size)

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        location = checkpoint.location
        if dialect.get("patch_vectors"):
            return Inferred({"preset": "native"}, "patches are vectors, as in NaFlex, which keeps the aspect ratio")
        if dialect["prefix"].endswith(TOWER):
            return evaluated_as({"preset": "lit"}, "image towers", location)
        if (of_flexivit := preprocessing_of_flexivit(location)) is not None:
            return Inferred(of_flexivit, "the name of the file is FlexiViT's")
        if dialect["names"] == "big_vision":
            return evaluated_as({"preset": "big_vision"}, "files of big_vision", location)
        preset = preset_of_vit(location)
        if preset == "augreg":
            return Inferred({"preset": preset}, "the name or address of the file is AugReg's")
        return evaluated_as({"preset": preset}, "files of vit_jax", location)

    def labels(self, checkpoint: Checkpoint, num_labels: int) -> list[str] | None:
        return labels_of_released(checkpoint.location, num_labels)

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        lacking = variants_of_the_paper(config)
        is_hybrid = isinstance(config, HfViTHybridConfig)
        if dialect != "big_vision":
            if config.pooling == "map":
                lacking.append("attention pooling (pooling='map')")
            if config.position_embedding_type == "sincos2d":
                lacking.append("fixed sine-cosine positions")
            if config.is_flexible:
                lacking.append("kernel of another size than the patches (a flexible model)")
        elif is_hybrid:
            lacking.append("ResNet stem")
        elif config.position_embedding_type == "none":
            lacking.append("way to omit position embeddings")
        if not config.qkv_bias:
            lacking.append("attention without biases")
        if (config.hidden_act, config.layer_norm_eps) != ("gelu_pytorch_tanh", 1e-6):
            lacking.append(
                f"{config.hidden_act} with LayerNorm epsilon {config.layer_norm_eps} (if the weights are a copy of an "
                "original file, convert them with --set hidden_act=gelu_pytorch_tanh --set layer_norm_eps=1e-6 and "
                "export that folder)"
            )
        if config.norm_after_pooling:
            lacking.append("LayerNorm after the pooling")
        if config.pool_patches_only and config.use_cls_token and config.pooling in ("mean", "map"):
            lacking.append("pooling without the class token")
        return lacking + (other_numbers(config, _STEM_NUMBERS) if is_hybrid else [])

    def write(self, model: Model, path: Path, options: Writing) -> dict[str, Any]:
        dialect = {**record_of(model).get("dialect", {}), "names": options.dialect}
        arrays = self.arrays(model, dialect)
        write_npz(path, ((dialect_name(name, Dialect(options.dialect)), array) for name, array in arrays))
        return {}

    def arrays(self, model: Model, dialect: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        rules = self.rules(model.config, has_head(model))
        arrays = arrays_of(model, rules, self.head, dialect)
        if dialect["names"] == "big_vision" and model.config.use_cls_token:
            tables = [model.state_dict()[rule.ours] for rule in rules if rule.theirs == POSITIONS]
            arrays = _fold_class_row(arrays, tables[0][:, :1] if tables else None)
        return as_patch_vectors(arrays, model.config.stored_grid) if dialect.get("patch_vectors") else arrays


def labels_of_released(location: str, num_labels: int) -> list[str] | None:
    """Return the class names of a released file, by its address; None for any other file."""
    entry = find_released(location) if "://" in location else None
    known = entry.facts.get("labels") if entry is not None else None
    names = built_in_class_names(known) if known in BUILT_IN else None
    return names if names is not None and len(names) == num_labels else None


def evaluated_as(settings: dict[str, Any], kind: str, location: str) -> Inferred:
    """Infer the usual preprocessing of a kind of file: known for a released file (by its name), else assumed."""
    if find_released(location) is not None:
        return Inferred(settings, "evaluation of the released file of this name")
    return Inferred(settings, f"no array shows it; evaluation of released {kind}", is_assumed=True)


def _as_released(image_size: Inferred, location: str) -> Inferred:
    """Return the image size; it is no longer an assumption if the catalog has a file of this name and image size."""
    released = find_released(location)
    if released is None or not image_size.is_assumed or image_size.value != released.facts.get("resolution"):
        return image_size
    reason = image_size.reason.removesuffix(", if the grid is square")
    reason += f"; the released file of this name has images of {image_size.value} pixels"
    return Inferred(image_size.value, reason)


def _pooling(shapes: Shapes, checkpoint: Checkpoint) -> Inferred:
    """Infer the pooling; a language model uses every token (PaliGemma)."""
    if "MAPHead_0/probe" in shapes:
        return Inferred("map", "there is a MAP head")
    if "cls" in shapes:
        return Inferred("cls", "there is an array cls, and no MAP head")
    if has_language_model(checkpoint.shapes):
        return Inferred("none", "the file also holds a language model, which uses every token")
    return Inferred("mean", "there is no array cls, and no MAP head")


def _positions(shapes: Shapes) -> Inferred:
    if POSITIONS in shapes:
        return Inferred("learned", f"there is a table of positions, {by(shapes[POSITIONS])}")
    return Inferred("sincos2d", "there is no table of positions; big_vision then computes them", is_assumed=True)


def _similarity(checkpoint: Checkpoint, prefix: str) -> dict[str, float]:
    """Read temperature `t` (a logarithm) and bias `b` of the similarity of two towers, if the file holds them."""
    root = prefix.removesuffix(TOWER)
    names = {name: root + name for name in ("t", "b")} if root != prefix else {}
    single = {name: stored for name, stored in names.items() if math.prod(checkpoint.shapes.get(stored, (0,))) == 1}
    numbers = {name: float(checkpoint.read(stored)) for name, stored in single.items()}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def flat_norms(checkpoint: Checkpoint, arrays: Mapping[str, StoredArray]) -> dict[str, bool]:
    """Return the record's entry for GroupNorm arrays of shape (channels,), which an export restores."""
    is_flat = any(
        _GROUP_NORM.search(name) and len(checkpoint.shapes[stored.name]) == 1 for name, stored in arrays.items()
    )
    return {"flat_group_norm": True} if is_flat else {}


def arrays_of(
    model: Model, rules: list[Rule], head: tuple[str, str], dialect: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name in the rules, view of our parameter) of a model, and an untrained head that was dropped."""
    state_dict = model.state_dict()
    if dialect.get("flat_group_norm"):
        rules = with_flat_norms(rules)
    for theirs, ours, layout in rules:
        yield theirs, layout.to_theirs(state_dict[ours])
    left_out = record_of(model).get("left_out", {}).get("head")
    if left_out and not has_head(model):
        kernel = torch.zeros(left_out["shape"], dtype=model.dtype)
        yield head[0], kernel
        yield head[1], kernel.new_full(kernel.shape[-1:], left_out["bias"])


def _fold_class_row(
    arrays: Iterator[tuple[str, torch.Tensor]], class_row: torch.Tensor | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Add the class token's position to the class token itself: big_vision has no such position."""
    for name, array in arrays:
        if name == "cls" and class_row is not None and class_row.any():  # adding zero would change -0.0
            array = array + class_row
        yield name, array[:, 1:] if name == POSITIONS else array


# FlexiViT (arXiv 2212.08013): folder of the released files, and of a training run; its stored sizes and image size
_FLEXIVIT = "big_vision/flexivit/"
_FLEXIVIT_KERNEL, _FLEXIVIT_GRID, _FLEXIVIT_IMAGE_SIZE = (32, 32), (7, 7), 240


def flexible_fields(
    fields: Mapping[str, Inferred], grid: tuple[int, int], checkpoint: Checkpoint, patch_size: Size | None
) -> Fields:
    """Infer the configuration fields that make a model flexible; return an empty dictionary for any other model.

    Only the name of a released file shows that a model is flexible. Another file with FlexiViT's sizes may also be a
    ViT-B/32 for 224 pixels, so the caller must state the patch size.

    Args:
        fields: inferred fields, with the kernel's size as the patch size.
        grid: (rows, columns) of the position embeddings.
        checkpoint: the open checkpoint.
        patch_size: patch size that the caller states.

    Raises:
        ConversionError: the patch size is ambiguous, and the caller has not stated it.
    """
    is_of_vit_jax = any(name.endswith(POSITIONS) for name in checkpoint.shapes)
    if fields["position_embedding_type"].value != "learned" or is_of_vit_jax or "stem_depths" in fields:
        return {}
    sizes = sizes_of_flexivit(checkpoint.location)
    kernel = as_pair(fields["patch_size"].value)
    has_its_buffers = kernel == _FLEXIVIT_KERNEL and grid == _FLEXIVIT_GRID
    looks_flexible = (has_its_buffers and fields["pooling"].value == "mean") or _FLEXIVIT in checkpoint.location
    if sizes is None and not looks_flexible:
        return {}
    if sizes is None and patch_size is None:
        raise ConversionError(
            f"cannot infer the patch size of {checkpoint.path.name}: its stored sizes are FlexiViT's ({kernel[0]} x "
            f"{kernel[1]} kernel, {grid[0]} x {grid[1]} positions); state patch_size=16 (any from 8 to 48) for a "
            f"FlexiViT at {_FLEXIVIT_IMAGE_SIZE} pixels, patch_size={kernel[0]} for a ViT with patches of {kernel[0]}"
        )
    known_patch, image_size = sizes or (patch_size, _FLEXIVIT_IMAGE_SIZE)
    reason = "the name of the file is FlexiViT's" if sizes else "its stored sizes are FlexiViT's"
    return {
        "stored_patch_size": fields["patch_size"],
        "position_grid": Inferred(grid, reason) if sizes else fields["image_size"]._replace(value=grid),
        "patch_size": Inferred(known_patch, reason),
        "image_size": Inferred(image_size, reason, is_assumed=sizes is None),
        # half-pixel centres, antialiased: jax.image.resize(..., "linear")
        "position_interpolation": Inferred("bilinear", "as in FlexiViT"),
    }


# SigLIP 2 NaFlex: patches are vectors, the patch embedding is a matrix, positions are (rows, columns, hidden_size).
_PATCHES, _RGB = "embedding/kernel", 3


def as_convolution(checkpoint: Checkpoint, arrays: dict[str, StoredArray]) -> dict[str, StoredArray]:
    """Give NaFlex's arrays the shapes of the rules; the values of a patch are ordered row, column, channel.

    Raises:
        ConversionError: a patch is not a square with three channels, or positions are not on a grid.
    """
    file, kernel = checkpoint.path.name, arrays[_PATCHES]
    values, hidden_size = checkpoint.shapes[kernel.name]
    side = math.isqrt(values // _RGB)
    if side * side * _RGB != values:
        raise ConversionError(f"{file} has patches of {values} values (expected a square with {_RGB} channels)")
    changed = {_PATCHES: kernel._replace(shape=(side, side, _RGB, hidden_size))}
    if POSITIONS in arrays:
        shape = checkpoint.shapes[arrays[POSITIONS].name]
        if len(shape) != 3 or shape[2] != hidden_size:
            raise ConversionError(f"{file} has positions of shape {shape} (expected (rows, columns, {hidden_size}))")
        changed[POSITIONS] = arrays[POSITIONS]._replace(shape=(1, shape[0] * shape[1], hidden_size))
    return arrays | changed


def as_patch_vectors(
    arrays: Iterator[tuple[str, torch.Tensor]], grid: tuple[int, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give arrays of the rules NaFlex's shapes: the inverse of `as_convolution`."""
    for name, array in arrays:
        if name == _PATCHES:
            array = array.flatten(0, 2)
        yield name, array[0].unflatten(0, grid) if name == POSITIONS else array
