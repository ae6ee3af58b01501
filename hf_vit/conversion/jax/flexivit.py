"""FlexiViT (arXiv 2212.08013): recognition of flexible files, and their sizes."""

from collections.abc import Mapping

from ...catalog.evaluation import sizes_of_flexivit
from ...models.configuration_hf_vit import Size, as_pair
from ..checkpoint import Checkpoint
from ..inferred import Fields, Inferred
from ..rules import ConversionError
from .table import POSITIONS

_PLACE = "big_vision/flexivit/"  # folder of the released files, and of a training run
_KERNEL, _GRID, _IMAGE_SIZE = 32, 7, 240  # stored patch size, stored grid, image size


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
    has_its_buffers = kernel == (_KERNEL, _KERNEL) and grid == (_GRID, _GRID)
    looks_flexible = (has_its_buffers and fields["pooling"].value == "mean") or _PLACE in checkpoint.location
    if sizes is None and not looks_flexible:
        return {}
    if sizes is None and patch_size is None:
        raise ConversionError(
            f"cannot infer the patch size of {checkpoint.path.name}: its stored sizes are FlexiViT's ({kernel[0]} x "
            f"{kernel[1]} kernel, {grid[0]} x {grid[1]} positions); state patch_size=16 (any from 8 to 48) for a "
            f"FlexiViT at {_IMAGE_SIZE} pixels, patch_size={kernel[0]} for a ViT with patches of {kernel[0]}"
        )
    known_patch, image_size = sizes or (patch_size, _IMAGE_SIZE)
    because = "the name of the file is FlexiViT's" if sizes else "its stored sizes are FlexiViT's"
    return {
        "stored_patch_size": fields["patch_size"],
        "position_grid": Inferred(grid, because) if sizes else fields["image_size"]._replace(value=grid),
        "patch_size": Inferred(known_patch, because),
        "image_size": Inferred(image_size, because, is_assumed=sizes is None),
        # half-pixel centres, antialiased: jax.image.resize(..., "linear")
        "position_interpolation": Inferred("bilinear", "as in FlexiViT"),
    }
