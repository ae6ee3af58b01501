"""FlexiViT (arXiv 2212.08013): which files are flexible, and at which sizes they compute."""

from collections.abc import Mapping

from ...catalog.evaluation import sizes_of_flexivit
from ...models.configuration_hf_vit import Size, as_pair
from ..checkpoint import Checkpoint
from ..inferred import Fields, Inferred
from ..rules import ConversionError
from .table import POSITIONS

_PLACE = "big_vision/flexivit/"  # of the released files, and of the folder of a run
_KERNEL, _GRID, _IMAGE_SIZE = 32, 7, 240  # of what FlexiViT stores, and of its images


def flexible_fields(
    fields: Mapping[str, Inferred], grid: tuple[int, int], checkpoint: Checkpoint, patch_size: Size | None
) -> Fields:
    """The fields of the configuration that make a model flexible; empty for any other.

    Nothing in a file says that its kernel is only a buffer. Its name does, if it is a released one; another file with
    FlexiViT's buffers may as well be a ViT-B/32 for 224 pixels, so that the caller has to state the patch size.

    Args:
        fields: of a model whose kernel is that of its patches.
        grid: (rows, columns) of its position embeddings.
        patch_size: what the caller states.

    Raises:
        ConversionError: only the caller can know the patch size, and has not stated it.
    """
    is_of_vit_jax = any(name.endswith(POSITIONS) for name in checkpoint.shapes)
    if fields["position_embedding_type"].value != "learned" or is_of_vit_jax or "stem_depths" in fields:
        return {}
    sizes = sizes_of_flexivit(checkpoint.location)
    kernel = as_pair(fields["patch_size"].value)
    has_its_buffers = kernel == (_KERNEL, _KERNEL) and grid == (_GRID, _GRID)
    looks_flexible = (has_its_buffers and fields["pooling"].value == "mean") or _PLACE in checkpoint.location
    if sizes is None and not looks_flexible:
        return {}
    if sizes is None and patch_size is None:
        raise ConversionError(
            f"{checkpoint.path.name} has what FlexiViT stores ({kernel[0]} x {kernel[1]} kernel, {grid[0]} x {grid[1]} "
            "positions) and does not say its patch size; state it: patch_size=16 (any from 8 to 48) for a FlexiViT at "
            f"{_IMAGE_SIZE} pixels, patch_size={kernel[0]} for a ViT with patches of {kernel[0]}"
        )
    known_patch, image_size = sizes or (patch_size, _IMAGE_SIZE)
    because = "the name of the file is FlexiViT's" if sizes else "it has what FlexiViT stores, which is for such images"
    return {
        "stored_patch_size": fields["patch_size"],
        "position_grid": Inferred(grid, because) if sizes else fields["image_size"]._replace(value=grid),
        "patch_size": Inferred(known_patch, because),
        "image_size": Inferred(image_size, because, is_assumed=sizes is None),
        # half-pixel centres, antialiased: jax.image.resize(..., "linear")
        "position_interpolation": Inferred("bilinear", "FlexiViT resamples so"),
    }
