"""Building a model from arrays: inferring sizes, making an empty model, filling it."""

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
from ..models.modeling_hf_bit import HfBiTForImageClassification, HfBiTModel
from ..models.modeling_hf_vit import (
    HfViTForImageClassification,
    HfViTHybridForImageClassification,
    HfViTHybridModel,
    HfViTModel,
)
from ..models.pretrained import HfVisionPreTrainedModel
from .checkpoint import Checkpoint
from .inferred import Inferred, by
from .rules import ConversionError, Rule, check_values

# By configuration: the bare encoder and the classifier.
_MODELS: dict[type, tuple[type[HfVisionPreTrainedModel], type[HfVisionPreTrainedModel]]] = {
    HfViTConfig: (HfViTModel, HfViTForImageClassification),
    HfViTHybridConfig: (HfViTHybridModel, HfViTHybridForImageClassification),
    HfBiTConfig: (HfBiTModel, HfBiTForImageClassification),
}
_DEFAULT_IMAGE_SIZE = 224  # for a file without a table of positions
UNKNOWN_IMAGE_SIZE = Inferred(_DEFAULT_IMAGE_SIZE, "no array of a ResNet shows it; the usual size", is_assumed=True)


class StoredArray(NamedTuple):
    """Place of an array in the file.

    name: name in the file.
    index: index in a stack of several arrays; None without a stack.
    lacks_class_row: the table of positions has no row for the class token; a row of zeros is added.
    shape: shape that the rules expect, if the file stores the numbers in another shape; None for the file's own.
    """

    name: str
    index: int | None = None
    lacks_class_row: bool = False
    shape: tuple[int, ...] | None = None


def shapes_of(checkpoint: Checkpoint, arrays: Mapping[str, StoredArray]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the rules see: of a single block, with a row for the class token."""
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
    """Describe an untrained head (weight all zero, bias constant); return an empty dictionary for any other head.

    Args:
        checkpoint: the open checkpoint.
        arrays: name in the rules -> place.
        head: names of the head's weight and bias.
        outputs_first: the weight is (out, in, ...); the returned shape is JAX's, (in, out).
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
    """Check the arrays that sizes are read from: they exist, with the right number of axes.

    Args:
        shapes: name in the rules -> shape.
        required: name -> number of axes, for arrays that must exist.
        optional: name -> number of axes, for arrays that may be absent.
        file: name of the file, for messages.

    Raises:
        ConversionError: an array is missing, or has another number of axes.
    """
    if missing := [name for name in required if name not in shapes]:
        raise ConversionError(
            f"cannot convert {file}: its arrays do not match its architecture; missing: {', '.join(missing)}"
        )
    for name, ndim in {**required, **optional}.items():
        if name in shapes and len(shapes[name]) != ndim:
            raise ConversionError(f"{file} has {name} with shape {shapes[name]} (expected {ndim} axes)")


def build_config(fields: dict[str, Any]) -> Any:
    """Build a configuration: of a hybrid if `stem_depths` is a field, of a ResNet if `depths` is, else of a ViT."""
    config_class: Any = HfBiTConfig if "depths" in fields else HfViTConfig
    if "stem_depths" in fields:
        config_class = HfViTHybridConfig
    return config_class(**fields)


def empty_model(config: Any, has_head: bool) -> HfVisionPreTrainedModel:
    """Make a model without weights, on the meta device."""
    with torch.device("meta"):
        return _MODELS[type(config)][has_head](config)


def fill(
    model: HfVisionPreTrainedModel,
    rules: list[Rule],
    checkpoint: Checkpoint,
    arrays: Mapping[str, StoredArray],
    weights: Path | None,
) -> None:
    """Give an empty model its parameters, in float32, after checking all values; shapes are already checked.

    Args:
        model: the empty model.
        rules: its rules.
        checkpoint: the open checkpoint.
        arrays: name in the rules -> place.
        weights: a .safetensors file to stream the arrays into, if the checkpoint supports it; the model then stays
            empty.

    Raises:
        ConversionError: an array is not floating point, or not finite.
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
    """Yield (our name, parameter) for every rule; each array is read once, and freed after its own rules."""
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
        raise ConversionError(f"cannot convert {checkpoint.path.name}: {'; '.join(problems)}")


def has_head(model: HfVisionPreTrainedModel) -> bool:
    """Tell whether a model is more than the bare encoder."""
    return model.base_model is not model


def _fits(num_patches: int, grid: tuple[int, int] | None) -> bool:
    """Tell whether a table of positions has the given grid, or a square grid if none is given."""
    return num_patches == (grid[0] * grid[1] if grid else math.isqrt(num_patches) ** 2)


def with_class_row(
    checkpoint: Checkpoint, arrays: dict[str, StoredArray], cls: str, positions: str, grid: tuple[int, int] | None
) -> dict[str, StoredArray]:
    """Return the arrays; a table of positions for the patches only is marked as `lacks_class_row`.

    big_vision, DeiT III and FlexiViT have such tables (`no_embed_class`).
    """
    table = arrays.get(positions)
    shape = checkpoint.shapes[table.name] if table else ()
    if table is None or cls not in arrays or len(shape) != 3 or not _fits(shape[1], grid):
        return arrays
    return {**arrays, positions: table._replace(lacks_class_row=True)}


def image_size_of(
    num_patches: int | None, pixels: Sequence[int], grid: tuple[int, int] | None, file: str, has_cls: bool
) -> Inferred:
    """Infer the image size in pixels from a table of positions; one number if height and width are equal.

    Args:
        num_patches: rows of the table; None for a model without a table (assumed: about 224 x 224 pixels).
        pixels: height and width of a patch.
        grid: (rows, columns) that the caller states; a square by default.
        file: name of the file, for messages.
        has_cls: there is a class token; only for the reason.

    Raises:
        ConversionError: the number of rows does not match the grid, or is not a square.
    """
    if num_patches is None:
        rows, columns = grid or (max(_DEFAULT_IMAGE_SIZE // size, 1) for size in pixels)
        known = "no positions show it; taken as"
    elif _fits(num_patches, grid):
        rows, columns = grid or (math.isqrt(num_patches), math.isqrt(num_patches))
        known = f"{num_patches} positions" + (", without the class token's:" if has_cls else ":")
    else:
        expected = f"{grid[0]} x {grid[1]}, the position_grid" if grid else "a square"
        raise ConversionError(
            f"{file} has position embeddings for {num_patches} patches (expected {expected}); "
            "state their grid as position_grid=(rows, columns)"
        )
    because = f"{known} {rows} x {columns} patches of {by(pixels)} pixels"
    because += ", if the grid is square" if num_patches is not None and grid is None else ""
    return Inferred(one_or_pair(rows * pixels[0], columns * pixels[1]), because, is_assumed=grid is None)


def one_or_pair(rows: int, columns: int) -> int | tuple[int, int]:
    """Return a size in the form of the configuration: an int if both numbers are equal."""
    return rows if rows == columns else (rows, columns)


def variants_of_the_paper(config: HfViTConfig) -> list[str]:
    """List the paper's ablations in a model; no other format supports them."""
    variants = []
    if config.position_embedding_type in ("learned2d", "relative"):
        variants.append(f"position embeddings of type {config.position_embedding_type}")
    if config.position_embedding_placement != "input":
        variants.append("position embeddings in every layer")
    if config.attention_axes == "axial":
        variants.append("axial attention")
    return variants


def projection(config: HfViTConfig) -> list[str]:
    """List a projection to an embedding, for formats that do not support it."""
    return [] if config.projection_dim is None else ["projection to an embedding (projection_dim)"]


def other_numbers(config: HfVisionConfig, numbers: Mapping[str, Any]) -> list[str]:
    """List a ResNet that a format does not support: with other numbers than the format's, or with axial attention."""
    if getattr(config, "spatial_mixing", "convolution") == "axial_attention":
        return ["ResNet with axial attention (spatial_mixing)"]
    if all(getattr(config, field) == value for field, value in numbers.items()):
        return []
    return ["ResNet with " + ", ".join(f"{field} {getattr(config, field)}" for field in numbers)]
