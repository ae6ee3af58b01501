"""What every reader of checkpoints needs: an empty model to fill, and sizes that tables of positions imply."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from ..models.pretrained import HfViTPreTrainedModel
from ..models.upstream import MODELS
from .rules import ConversionError, Rule

DEFAULT_IMAGE_SIZE = 224  # where a file has no table of positions to read it from


def empty_model(fields: dict[str, Any], has_head: bool) -> HfViTPreTrainedModel:
    """A model on the meta device.

    With `stem_depths` among the fields of its configuration it is a hybrid, with `depths` a ResNet.
    """
    config_class = HfViTHybridConfig if "stem_depths" in fields else HfBiTConfig if "depths" in fields else HfViTConfig
    with torch.device("meta"):
        return MODELS[config_class][has_head](config_class(**fields))


def variants_of_the_paper(config: HfViTConfig) -> list[str]:
    """What of a model is one of the paper's comparisons, which no format of released checkpoints can say."""
    variants = []
    if config.position_embedding_type in ("learned2d", "relative"):
        variants.append(f"position embeddings of type {config.position_embedding_type}")
    if config.position_embedding_placement != "input":
        variants.append("position embeddings in every layer")
    if config.attention_axes == "axial":
        variants.append("axial attention")
    return variants


def rules_for_model(model: HfViTPreTrainedModel, rules: Iterable[Rule]) -> list[Rule]:
    """Rules that speak of a classifier, for a model that may be the bare encoder."""
    if model.base_model is not model:
        return list(rules)
    return [rule._replace(ours=rule.ours.removeprefix(f"{model.base_model_prefix}.")) for rule in rules]


def check_required(
    shapes: Mapping[str, tuple[int, ...]], required: Mapping[str, int], optional: Mapping[str, int], file: str
) -> None:
    """The arrays that sizes are read from are there, with as many axes as they must have.

    Raises:
        ConversionError: the first that is not.
    """
    if missing := [name for name in required if name not in shapes]:
        raise ConversionError(f"{file} does not hold what its layout needs; missing: {', '.join(missing)}")
    for name, ndim in {**required, **optional}.items():
        if name in shapes and len(shapes[name]) != ndim:
            raise ConversionError(f"{file} has {name} with shape {shapes[name]}; it needs {ndim} axes")


def fits(num_patches: int, grid: tuple[int, int] | None) -> bool:
    """Whether a table of positions has the given grid, or a square one."""
    return num_patches == (grid[0] * grid[1] if grid else math.isqrt(num_patches) ** 2)


def grid_of(num_patches: int, grid: tuple[int, int] | None, file: str) -> tuple[int, int]:
    """(rows, columns) of a table of positions.

    Raises:
        ConversionError: it is neither the grid that the caller states nor a square.
    """
    if not fits(num_patches, grid):
        expected = f"the {grid[0]} x {grid[1]} of position_grid" if grid else "a square"
        raise ConversionError(
            f"{file} has position embeddings for {num_patches} patches, which is not {expected}; "
            "state the shape of their grid as position_grid=(rows, columns)"
        )
    return grid or (math.isqrt(num_patches), math.isqrt(num_patches))


def default_grid(pixels: Sequence[int]) -> tuple[int, int]:
    """The grid of an image of 224 pixels, where the model has no table; `pixels`: height and width of a patch."""
    return max(DEFAULT_IMAGE_SIZE // pixels[0], 1), max(DEFAULT_IMAGE_SIZE // pixels[1], 1)


def image_size_of(grid: tuple[int, int], pixels: Sequence[int]) -> int | tuple[int, int]:
    """In pixels: one number where height and width are equal."""
    height, width = grid[0] * pixels[0], grid[1] * pixels[1]
    return height if height == width else (height, width)


def one_or_pair(rows: int, columns: int) -> int | tuple[int, int]:
    return rows if rows == columns else (rows, columns)


def is_untrained(weight: torch.Tensor, bias: torch.Tensor) -> bool:
    """Whether a head is as it was initialised: all zero, with one value in its bias."""
    return not weight.any() and not (bias != bias[0]).any()
