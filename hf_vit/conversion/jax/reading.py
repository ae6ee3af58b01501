"""From an original JAX checkpoint (.npz) to a model: everything is inferred from array names and shapes."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ...files.npz import ArrayInfo, NpzReader
from ...files.safetensors_stream import write_safetensors
from ...models.configuration_hf_vit import stem_stride
from ...models.pretrained import HfViTPreTrainedModel
from ..building import (
    check_required,
    default_grid,
    empty_model,
    fits,
    grid_of,
    image_size_of,
    is_untrained,
    one_or_pair,
    rules_for_model,
)
from ..rules import ConversionError, Rule, check_names, check_shapes, check_values
from . import bit_layout
from .layout import POSITIONS, Dialect, StoredArray, recognise, rules_for


class JaxCheckpoint(NamedTuple):
    """What the names and shapes of a file say.

    arrays: for every name of the rules, where its array is.
    fields: of the configuration, as inferred.
    rules_for: the rules of a configuration, with or without a head.
    head: names of the head's kernel and bias.
    class_row_missing: whether the table of positions lacks the row of the class token.
    left_out: the head, if it is all zero: its shape and bias, to write it back.
    """

    dialect: Dialect
    arrays: dict[str, StoredArray]
    fields: dict[str, Any]
    rules_for: Callable[[Any, bool], list[Rule]] = rules_for
    head: tuple[str, str] = ("head/kernel", "head/bias")
    class_row_missing: bool = False
    left_out: dict[str, Any] = {}  # noqa: RUF012 - a NamedTuple's default, which nobody changes

    @property
    def has_head(self) -> bool:
        return self.head[0] in self.arrays


def read_jax(
    path: Path, position_grid: tuple[int, int] | None = None, weights: Path | None = None, **overrides: Any
) -> tuple[HfViTPreTrainedModel, dict[str, Any]]:
    """Read a checkpoint of vit_jax, big_vision or big_transfer.

    Args:
        path: the .npz file.
        position_grid: (rows, columns) of the table of positions; a square by default.
        weights: a .safetensors file that they are streamed into, array by array; the model then has none.
        overrides: fields of the configuration that no array shows, such as `pooling="none"`.

    Returns:
        The model in float32, without a head where the file has none (or one that is all zero), and what was inferred.

    Raises:
        NpzError: the file is damaged or not an .npz.
        ConversionError: it does not hold a ViT, or arrays are missing, left over, of the wrong shape or not finite.
    """
    with NpzReader(path) as reader:
        checkpoint = leave_out_zero_head(reader, describe(reader, path.name, position_grid))
        model = empty_model({**checkpoint.fields, **overrides}, checkpoint.has_head)
        rules = _checked_rules(reader, checkpoint, model, path.name)
        arrays = _convert_arrays(reader, checkpoint, rules, path.name)
        if weights is None:
            model.load_state_dict(dict(arrays), assign=True)
        else:
            parameters = model.state_dict()
            write_safetensors(weights, {rule.ours: tuple(parameters[rule.ours].shape) for rule in rules}, arrays)
        record = _record(reader, checkpoint, overrides)
    return model.eval(), record


def describe(reader: NpzReader, file: str, position_grid: tuple[int, int] | None = None) -> JaxCheckpoint:
    """Recognise the dialect and infer the configuration; reads no array."""
    if (bit := bit_layout.recognise(list(reader.arrays))) is not None:
        return _describe_bit(reader, *bit, file)
    dialect, arrays = recognise(list(reader.arrays), _depth_of_stack(reader.arrays, file), file)
    shapes = _shapes(reader, arrays)
    _check_what_is_inferred_from(shapes, file)
    fields = infer(shapes) | _infer_positions(shapes, dialect, position_grid, file)
    class_row_missing = fields.pop("class_row_missing")
    return JaxCheckpoint(dialect, arrays, fields, class_row_missing=class_row_missing)


def _describe_bit(reader: NpzReader, dialect: Dialect, arrays: dict[str, StoredArray], file: str) -> JaxCheckpoint:
    shapes, names = _shapes(reader, arrays), bit_layout.NAMES[dialect.names]
    kernel, bias = (rule.theirs for rule in names.head)
    check_required(shapes, {names.root[0].theirs: 4}, {kernel: 4 if dialect.names == "big_transfer" else 2}, file)
    rules_of_dialect = partial(bit_layout.rules_for, code=dialect.names)
    return JaxCheckpoint(
        dialect, arrays, bit_layout.infer(shapes, dialect.names), rules_of_dialect, head=(kernel, bias)
    )


def leave_out_zero_head(reader: NpzReader, checkpoint: JaxCheckpoint) -> JaxCheckpoint:
    """Without an untrained head, as the ImageNet-21k files have it."""
    if not all(name in checkpoint.arrays for name in checkpoint.head):
        return checkpoint
    kernel, bias = (reader.read(checkpoint.arrays[name].name) for name in checkpoint.head)
    if not is_untrained(kernel, bias):
        return checkpoint
    arrays = {name: stored for name, stored in checkpoint.arrays.items() if name not in checkpoint.head}
    left_out = {"head": {"shape": list(kernel.shape), "bias": float(bias[0])}}
    return checkpoint._replace(arrays=arrays, left_out=left_out)


def _checked_rules(reader: NpzReader, checkpoint: JaxCheckpoint, model: HfViTPreTrainedModel, file: str) -> list[Rule]:
    """The rules of a model, those of one array of the file side by side, after checking all names and shapes."""
    rules = rules_for_model(model, checkpoint.rules_for(model.config, checkpoint.has_head))
    check_names(rules, checkpoint.arrays, file)
    shapes = _shapes(reader, checkpoint.arrays)
    if checkpoint.class_row_missing:
        one, rows, width = shapes[POSITIONS]
        shapes[POSITIONS] = (one, rows + 1, width)
    check_shapes(shapes, model.state_dict(), rules, file)
    place = {name: index for index, name in enumerate(reader.arrays)}
    return sorted(rules, key=lambda rule: place[checkpoint.arrays[rule.theirs].name])


def _convert_arrays(
    reader: NpzReader, checkpoint: JaxCheckpoint, rules: list[Rule], file: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """(our name, parameter) of every rule; each array of the file is read once, and lives only for its own rules."""
    problems = []
    for name, its_rules in groupby(rules, key=lambda rule: checkpoint.arrays[rule.theirs].name):
        array = reader.read(name)
        problems += check_values(name, array)
        array = array.float()
        for theirs, ours, layout in its_rules:
            index = checkpoint.arrays[theirs].index
            part = array if index is None else array[index].clone()
            if theirs == POSITIONS and checkpoint.class_row_missing:
                part = pad(part, (0, 0, 1, 0))  # big_vision adds nothing to the class token
            yield ours, layout.to_ours(part).contiguous()
    if problems:
        raise ConversionError(f"{file} cannot be used: {'; '.join(problems)}")


def _record(reader: NpzReader, checkpoint: JaxCheckpoint, overrides: dict[str, Any]) -> dict[str, Any]:
    dialect = checkpoint.dialect
    dtypes = {str(reader.arrays[stored.name].dtype) for stored in checkpoint.arrays.values()}
    return {
        "dialect": dialect._asdict(),
        "dtypes": sorted("bfloat16" if dtype == "|V2" else dtype for dtype in dtypes),
        "inferred": checkpoint.fields,
        "overrides": overrides,
        "left_out": checkpoint.left_out,
        "beside": sorted({name.split("/")[0] for name in reader.arrays if not name.startswith(dialect.prefix)}),
    }


def _check_what_is_inferred_from(shapes: Mapping[str, tuple[int, ...]], file: str) -> None:
    block = "Transformer/encoderblock_0"
    required = {
        "embedding/kernel": 4,
        f"{block}/MultiHeadDotProductAttention_1/query/kernel": 3,
        f"{block}/MlpBlock_3/Dense_0/kernel": 2,
    }
    optional = {POSITIONS: 3, "pre_logits/kernel": 2, "head/kernel": 2, "conv_root/kernel": 4}
    check_required(shapes, required, optional, file)


def infer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The fields of the configuration, all but those of the positions, from the shapes of the arrays."""
    patch_rows, patch_columns, channels, hidden_size = shapes["embedding/kernel"]
    layers = [int(match[1]) for name in shapes if (match := re.match(r"Transformer/encoderblock_(\d+)/", name))]
    block = "Transformer/encoderblock_0"
    has_cls, has_map = "cls" in shapes, "MAPHead_0/probe" in shapes
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": max(layers) + 1,
        "num_attention_heads": shapes[f"{block}/MultiHeadDotProductAttention_1/query/kernel"][1],
        "intermediate_size": shapes[f"{block}/MlpBlock_3/Dense_0/kernel"][1],
        "patch_size": one_or_pair(patch_rows, patch_columns),
        "num_channels": channels,
        "pooling": "map" if has_map else "cls" if has_cls else "mean",
        "use_cls_token": has_cls,
        "representation_size": shapes["pre_logits/kernel"][1] if "pre_logits/kernel" in shapes else None,
    }
    if "head/kernel" in shapes:
        fields["num_labels"] = shapes["head/kernel"][1]
    return fields | _infer_stem(shapes) if "conv_root/kernel" in shapes else fields


def _infer_stem(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    depths: dict[int, int] = {}
    for name in shapes:
        if match := re.match(r"block(\d+)/unit(\d+)/", name):
            stage, unit = int(match[1]), int(match[2])
            depths[stage] = max(depths.get(stage, 0), unit)
    _, _, channels, width = shapes["conv_root/kernel"]
    return {
        "stem_depths": [depths.get(stage, 1) for stage in range(1, max(depths, default=0) + 1)],
        "stem_width": width,
        "num_channels": channels,
    }


def _infer_positions(
    shapes: Mapping[str, tuple[int, ...]], dialect: Dialect, grid: tuple[int, int] | None, file: str
) -> dict[str, Any]:
    stride = stem_stride(_infer_stem(shapes)["stem_depths"]) if "conv_root/kernel" in shapes else 1
    pixels = [size * stride for size in shapes["embedding/kernel"][:2]]  # of a patch, in the image
    if POSITIONS not in shapes:
        size = image_size_of(grid or default_grid(pixels), pixels)
        return {"position_embedding_type": "sincos2d", "image_size": size, "class_row_missing": False}
    rows, has_cls = shapes[POSITIONS][1], "cls" in shapes
    # big_vision's rule: a table of a square and one more has a row for the class token
    class_row_missing = has_cls and dialect.names == "big_vision" and fits(rows, grid)
    grid = grid_of(rows - (has_cls and not class_row_missing), grid, file)
    return {
        "position_embedding_type": "learned",
        "image_size": image_size_of(grid, pixels),
        "class_row_missing": class_row_missing,
    }


def _depth_of_stack(arrays: Mapping[str, ArrayInfo], file: str) -> int | None:
    depths = {info.shape[0] for name, info in arrays.items() if "Transformer/encoderblock/" in name and info.shape}
    if len(depths) > 1:
        raise ConversionError(f"{file} has stacked blocks of several depths: {', '.join(map(str, sorted(depths)))}")
    return depths.pop() if depths else None


def _shapes(reader: NpzReader, arrays: Mapping[str, StoredArray]) -> dict[str, tuple[int, ...]]:
    """Of the arrays by the names of the rules; a stacked array counts as its blocks."""
    shapes = {name: reader.arrays[stored.name].shape for name, stored in arrays.items()}
    return {name: shape if arrays[name].index is None else shape[1:] for name, shape in shapes.items()}
