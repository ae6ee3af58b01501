"""Source of the original's ViTs and hybrids: files of vit_jax, of present-day Flax and of big_vision."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...catalog import find_released
from ...catalog.evaluation import preprocessing_of_flexivit, preset_of_vit
from ...files.npz import write_npz
from ...models.configuration_hf_bit import ORIGINALS
from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, as_pair, stem_stride
from ...models.modeling_hf_vit import HfViTForImageClassification, HfViTModel
from ..building import (
    StoredArray,
    has_head,
    image_size_of,
    one_or_pair,
    other_numbers,
    variants_of_the_paper,
    with_class_row,
)
from ..checkpoint import Checkpoint
from ..inferred import Fields, Inferred, all_because, by, has_array, length_of
from ..record import record_of
from ..rules import Rule, count_units
from ..source import Model, Naming, Request, Shapes, Source, Writing
from .dialects import (
    TOWER,
    Dialect,
    dialect_name,
    grid_of_patch_vectors,
    has_language_model,
    has_patch_vectors,
    names_beside,
    recognise,
)
from .flexivit import flexible_fields
from .naflex import as_convolution, as_patch_vectors
from .table import POSITIONS, rules_for, with_flat_norms

_BLOCK = "Transformer/encoderblock_0"
_QUERY, _DENSE = f"{_BLOCK}/MultiHeadDotProductAttention_1/query/kernel", f"{_BLOCK}/MlpBlock_3/Dense_0/kernel"
_DENSE_AFTER = ("pre_logits/kernel", "head/kernel", "projection/kernel")
_GROUP_NORM = re.compile(r"(^|/)(gn[^/]*|norm-pre-head)/scale$")
_STEM_NUMBERS = {name: value for name, value in ORIGINALS["bit"].items() if "eps" in name or "form" in name}


class Jax(Source):
    """The original's ViTs and hybrids; all sizes are read from the arrays."""

    format = "jax"
    models = (HfViTModel, HfViTForImageClassification)
    dialects = ("vit_jax", "flax", "big_vision")
    head = ("head/kernel", "head/bias")
    required = {"embedding/kernel": 4, _QUERY: 3, _DENSE: 2}  # noqa: RUF012
    optional = {POSITIONS: 3, "conv_root/kernel": 4} | dict.fromkeys(_DENSE_AFTER, 2)

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
        layers = [int(match[1]) for name in shapes if (match := re.match(r"Transformer/encoderblock_(\d+)/", name))]
        has_cls, has_positions = "cls" in shapes, POSITIONS in shapes
        kernel = f"the kernel of the patches is {by(shapes['embedding/kernel'])}"
        fields: Fields = {
            "patch_size": Inferred(one_or_pair(patch_rows, patch_columns), kernel),
            "num_channels": Inferred(channels, kernel),
            "hidden_size": Inferred(hidden_size, kernel),
            "num_hidden_layers": Inferred(max(layers) + 1, f"the last block is encoderblock_{max(layers)}"),
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
            fields |= all_because({"stem_width": width, "num_channels": channels}, root)
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

    def rules(self, config: HfViTConfig, has_head: bool) -> list[Rule]:
        return rules_for(config, has_head)

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

    def lacks(self, model: Model, dialect: str) -> list[str]:
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
            lacking.append(f"{config.hidden_act} with LayerNorm epsilon {config.layer_norm_eps}")
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
    because = image_size.because.removesuffix(", if the grid is square")
    because += f"; the released file of this name has images of {image_size.value} pixels"
    return Inferred(image_size.value, because)


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
