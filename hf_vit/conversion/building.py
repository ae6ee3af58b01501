"""From arrays to a model: an empty one that is filled, and the sizes that arrays imply."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ..files.safetensors_stream import write_safetensors
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vision import HfVisionConfig
from ..models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from ..models.pretrained import HfVisionPreTrainedModel
from ..models.upstream import MODELS
from .checkpoint import Checkpoint
from .inferred import Inferred, by
from .rules import ConversionError, Rule, check_values

_DEFAULT_IMAGE_SIZE = 224  # where a file has no table of positions to read it from
UNKNOWN_IMAGE_SIZE = Inferred(_DEFAULT_IMAGE_SIZE, "no array of a ResNet shows it; the usual size", is_assumed=True)


class StoredArray(NamedTuple):
    """Where an array is: its name in the file, which of several that are stacked, and whether a row is missing.

    lacks_class_row: a table of positions has none for the class token, to which nothing is added: zeros.
    shape: that of the rules, where the file has the same numbers in another; None for the file's own.
    """

    name: str
    index: int | None = None
    lacks_class_row: bool = False
    shape: tuple[int, ...] | None = None


def shapes_of(checkpoint: Checkpoint, arrays: Mapping[str, StoredArray]) -> dict[str, tuple[int, ...]]:
    """The shapes as the rules speak of them: of one block, with a row for the class token."""
    shapes = {}
    for name, stored in arrays.items():
        shape = stored.shape or checkpoint.shapes[stored.name]
        if stored.index is not None:
            shape = shape[1:]
        if stored.lacks_class_row:
            shape = (shape[0], shape[1] + 1, *shape[2:])
        shapes[name] = shape
    return shapes


def untrained_head(
    checkpoint: Checkpoint, arrays: Mapping[str, StoredArray], head: tuple[str, str], outputs_first: bool
) -> dict[str, dict[str, Any]]:
    """A head as it was initialised, all zero, with one value in its bias; empty for any other.

    Args:
        head: names of its weight and bias.
        outputs_first: the weight is (out, in, ...); its shape is told as JAX has it, (in, out).
    """
    if any(name not in arrays for name in head):
        return {}
    weight, bias = (checkpoint.read(arrays[name].name) for name in head)
    if weight.ndim < 2 or weight.any() or not bias.ndim or (bias != bias[0]).any():
        return {}
    shape = [weight.shape[1], weight.shape[0]] if outputs_first else list(weight.shape)
    return {"head": {"shape": shape, "bias": float(bias[0])}}


def check_required(
    shapes: Mapping[str, tuple[int, ...]], required: Mapping[str, int], optional: Mapping[str, int], file: str
) -> None:
    """Check that the arrays that sizes are read from are there, with as many axes as they must have.

    Raises:
        ConversionError: the first that is not.
    """
    if missing := [name for name in required if name not in shapes]:
        raise ConversionError(f"{file} does not hold what its layout needs; missing: {', '.join(missing)}")
    for name, ndim in {**required, **optional}.items():
        if name in shapes and len(shapes[name]) != ndim:
            raise ConversionError(f"{file} has {name} with shape {shapes[name]}; it needs {ndim} axes")


def build_config(fields: dict[str, Any]) -> Any:
    """A configuration: with `stem_depths` among its fields that of a hybrid, with `depths` that of a ResNet."""
    config_class: Any = HfBiTConfig if "depths" in fields else HfViTConfig
    if "stem_depths" in fields:
        config_class = HfViTHybridConfig
    return config_class(**fields)


def empty_model(config: Any, has_head: bool) -> HfVisionPreTrainedModel:
    """A model on the meta device."""
    with torch.device("meta"):
        return MODELS[type(config)][has_head](config)


def fill(
    model: HfVisionPreTrainedModel,
    rules: list[Rule],
    checkpoint: Checkpoint,
    arrays: Mapping[str, StoredArray],
    weights: Path | None,
) -> None:
    """Give an empty model its parameters, in float32, after checking all values; shapes are right.

    Args:
        arrays: for every name of the rules, where its array is.
        weights: a .safetensors file that the arrays are streamed into, where the checkpoint allows it; the model then
            stays empty.

    Raises:
        ConversionError: arrays of the wrong type, or not finite.
    """
    parameters = model.state_dict()
    place = {name: index for index, name in enumerate(checkpoint.shapes)}
    rules = sorted(rules, key=lambda rule: place[arrays[rule.theirs].name])
    converted = _convert_arrays(rules, checkpoint, arrays)
    if weights is None or not checkpoint.streams:
        model.load_state_dict(dict(converted), assign=True)
    else:
        write_safetensors(weights, {rule.ours: tuple(parameters[rule.ours].shape) for rule in rules}, converted)


def _convert_arrays(
    rules: list[Rule], checkpoint: Checkpoint, arrays: Mapping[str, StoredArray]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(our name, parameter) of every rule; each array of the file is read once, and lives only for its own rules."""
    problems = []
    for name, its_rules in groupby(rules, key=lambda rule: arrays[rule.theirs].name):
        array = checkpoint.read(name)
        problems += check_values(name, array)
        array = array.float()
        for theirs, ours, layout in its_rules:
            _, index, lacks_class_row, shape = arrays[theirs]
            one = array if index is None else array[index].clone()
            one = one if shape is None else one.reshape(shape)
            one = pad(one, (0, 0, 1, 0)) if lacks_class_row else one
            yield ours, layout.to_ours(one).contiguous()
    if problems:
        raise ConversionError(f"{checkpoint.path.name} cannot be used: {'; '.join(problems)}")


def has_head(model: HfVisionPreTrainedModel) -> bool:
    """Whether a model is more than the bare encoder."""
    return model.base_model is not model


def _fits(num_patches: int, grid: tuple[int, int] | None) -> bool:
    """Whether a table of positions has the given grid, or a square one."""
    return num_patches == (grid[0] * grid[1] if grid else math.isqrt(num_patches) ** 2)


def with_class_row(
    checkpoint: Checkpoint, arrays: dict[str, StoredArray], cls: str, positions: str, grid: tuple[int, int] | None
) -> dict[str, StoredArray]:
    """The same arrays; a table of positions for the patches alone is one that lacks the row of the class token.

    So it is in big_vision, DeiT III and FlexiViT (`no_embed_class`).
    """
    table = arrays.get(positions)
    shape = checkpoint.shapes[table.name] if table else ()
    if table is None or cls not in arrays or len(shape) != 3 or not _fits(shape[1], grid):
        return arrays
    return {**arrays, positions: table._replace(lacks_class_row=True)}


def image_size_of(
    num_patches: int | None, pixels: Sequence[int], grid: tuple[int, int] | None, file: str, has_cls: bool
) -> Inferred:
    """The image size in pixels that a table of positions is for: one number where height and width are equal.

    Args:
        num_patches: rows of the table; None for a model without, of 224 x 224 pixels or about.
        pixels: height and width of a patch.
        grid: (rows, columns) that the caller states; a square by default.
        has_cls: whether there is a class token, for the reason.

    Raises:
        ConversionError: the table is neither of that grid nor of a square.
    """
    if num_patches is None:
        rows, columns = grid or (max(_DEFAULT_IMAGE_SIZE // size, 1) for size in pixels)
        known = "no positions show it; taken as"
    elif _fits(num_patches, grid):
        rows, columns = grid or (math.isqrt(num_patches), math.isqrt(num_patches))
        known = f"{num_patches} positions" + (", without the class token's:" if has_cls else ":")
    else:
        expected = f"the {grid[0]} x {grid[1]} of position_grid" if grid else "a square"
        raise ConversionError(
            f"{file} has position embeddings for {num_patches} patches, which is not {expected}; "
            "state the shape of their grid as position_grid=(rows, columns)"
        )
    because = f"{known} {rows} x {columns} patches of {by(pixels)} pixels"
    because += ", if the grid is square" if num_patches is not None and grid is None else ""
    return Inferred(one_or_pair(rows * pixels[0], columns * pixels[1]), because, is_assumed=grid is None)


def one_or_pair(rows: int, columns: int) -> int | tuple[int, int]:
    """A size as the configuration has it: an int where both are equal."""
    return rows if rows == columns else (rows, columns)


def variants_of_the_paper(config: HfViTConfig) -> list[str]:
    """The paper's comparisons in a model, which no format of released checkpoints can say."""
    variants = []
    if config.position_embedding_type in ("learned2d", "relative"):
        variants.append(f"position embeddings of type {config.position_embedding_type}")
    if config.position_embedding_placement != "input":
        variants.append("position embeddings in every layer")
    if config.attention_axes == "axial":
        variants.append("axial attention")
    return variants


def projection(config: HfViTConfig) -> list[str]:
    """The projection to an embedding, for the formats that have none."""
    return [] if config.projection_dim is None else ["projection to an embedding (projection_dim)"]


def other_numbers(config: HfVisionConfig, numbers: Mapping[str, Any]) -> list[str]:
    """The ResNet of a model, where it computes with other numbers than a format's, or with axial attention."""
    if getattr(config, "spatial_mixing", "convolution") == "axial_attention":
        return ["ResNet with axial attention (spatial_mixing)"]
    if all(getattr(config, field) == value for field, value in numbers.items()):
        return []
    return ["ResNet with " + ", ".join(f"{field} {getattr(config, field)}" for field in numbers)]
