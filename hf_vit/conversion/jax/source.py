"""The original's ViTs and hybrids: .npz files of vit_jax, of present-day Flax and of big_vision."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

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
from ..record import record_of
from ..rules import Rule, count_units
from ..source import Model, Naming, Request, Shapes, Source, Writing
from .dialects import TOWER, Dialect, dialect_name, has_language_model, has_patch_vectors, names_beside, recognise
from .flexivit import flexible_fields
from .naflex import as_convolution, as_patch_vectors
from .table import POSITIONS, rules_for, with_flat_norms

_BLOCK = "Transformer/encoderblock_0"
_QUERY, _DENSE = f"{_BLOCK}/MultiHeadDotProductAttention_1/query/kernel", f"{_BLOCK}/MlpBlock_3/Dense_0/kernel"
_DENSE_AFTER = ("pre_logits/kernel", "head/kernel", "projection/kernel")
_GROUP_NORM = re.compile(r"(^|/)(gn[^/]*|norm-pre-head)/scale$")
_STEM_NUMBERS = {name: value for name, value in ORIGINALS["bit"].items() if "eps" in name or "form" in name}


class Jax(Source):
    """One .npz with everything in it; heads and patch size are read from the kernels."""

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

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, request: Request) -> dict[str, Any]:
        patch_rows, patch_columns, channels, hidden_size = shapes["embedding/kernel"]
        layers = [int(match[1]) for name in shapes if (match := re.match(r"Transformer/encoderblock_(\d+)/", name))]
        has_cls, has_positions = "cls" in shapes, POSITIONS in shapes
        fields: dict[str, Any] = {
            "hidden_size": hidden_size,
            "num_hidden_layers": max(layers) + 1,
            "num_attention_heads": shapes[_QUERY][1],
            "intermediate_size": shapes[_DENSE][1],
            "patch_size": one_or_pair(patch_rows, patch_columns),
            "num_channels": channels,
            "pooling": _pooling(shapes, checkpoint),
            "use_cls_token": has_cls,
            "representation_size": shapes["pre_logits/kernel"][1] if "pre_logits/kernel" in shapes else None,
        }
        if has_patch_vectors(checkpoint.shapes):
            fields["position_interpolation"] = "bilinear"
        stride = 1
        if "head/kernel" in shapes:
            fields["num_labels"] = shapes["head/kernel"][1]
        if "projection/kernel" in shapes:
            fields["projection_dim"] = shapes["projection/kernel"][1]
        if "conv_root/kernel" in shapes:
            depths = count_units(shapes, r"block(\d+)/unit(\d+)/", first=1)
            _, _, channels, width = shapes["conv_root/kernel"]
            fields |= {"stem_depths": depths, "stem_width": width, "num_channels": channels}
            stride = stem_stride(depths)
        num_patches = shapes[POSITIONS][1] - has_cls if has_positions else None
        pixels = patch_rows * stride, patch_columns * stride
        image_size = image_size_of(num_patches, pixels, request.position_grid, checkpoint.path.name)
        fields |= {"position_embedding_type": "learned" if has_positions else "sincos2d", "image_size": image_size}
        rows, columns = (size // side for size, side in zip(as_pair(image_size), pixels, strict=True))
        return fields | flexible_fields(fields, (rows, columns), checkpoint, request.patch_size)

    def rules(self, config: HfViTConfig, has_head: bool) -> list[Rule]:
        return rules_for(config, has_head)

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> dict[str, Any]:
        if dialect.get("patch_vectors"):
            return {"preset": "native"}
        if dialect["prefix"].endswith(TOWER):
            return {"preset": "lit"}
        if (of_flexivit := preprocessing_of_flexivit(checkpoint.location)) is not None:
            return of_flexivit
        return {"preset": "big_vision" if dialect["names"] == "big_vision" else preset_of_vit(checkpoint.location)}

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
            lacking.append("way to leave out position embeddings")
        if not config.qkv_bias:
            lacking.append("attention without biases")
        if (config.hidden_act, config.layer_norm_eps) != ("gelu_pytorch_tanh", 1e-6):
            lacking.append(f"{config.hidden_act} with LayerNorm epsilon {config.layer_norm_eps}")
        if config.norm_after_pooling:
            lacking.append("LayerNorm after the pooling")
        if config.pool_patches_only and config.use_cls_token and config.pooling in ("mean", "map"):
            lacking.append("pooling that leaves out the class token")
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


def _pooling(shapes: Shapes, checkpoint: Checkpoint) -> str:
    """What the head sees; a language model looks at every token (PaliGemma)."""
    if "MAPHead_0/probe" in shapes:
        return "map"
    if "cls" in shapes:
        return "cls"
    return "none" if has_language_model(checkpoint.shapes) else "mean"


def _similarity(checkpoint: Checkpoint, prefix: str) -> dict[str, float]:
    """The temperature `t` (a logarithm) and the bias `b` of the similarity of two towers, where they stand beside."""
    root = prefix.removesuffix(TOWER)
    names = {name: root + name for name in ("t", "b")} if root != prefix else {}
    single = {name: stored for name, stored in names.items() if math.prod(checkpoint.shapes.get(stored, (0,))) == 1}
    numbers = {name: float(checkpoint.read(stored)) for name, stored in single.items()}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def flat_norms(checkpoint: Checkpoint, arrays: Mapping[str, StoredArray]) -> dict[str, bool]:
    """What the record says of GroupNorm arrays of shape (channels,), so that they are written back so."""
    is_flat = any(
        _GROUP_NORM.search(name) and len(checkpoint.shapes[stored.name]) == 1 for name, stored in arrays.items()
    )
    return {"flat_group_norm": True} if is_flat else {}


def arrays_of(
    model: Model, rules: list[Rule], head: tuple[str, str], dialect: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name of the rules, view of our parameter) of a model; with the untrained head that was left out."""
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
    """big_vision adds no position to the class token: its row is part of it."""
    for name, array in arrays:
        if name == "cls" and class_row is not None and class_row.any():  # adding zero would lose the sign of -0.0
            array = array + class_row
        yield name, array[:, 1:] if name == POSITIONS else array
