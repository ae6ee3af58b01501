"""Images in their own aspect ratio: sizes that the patches divide, images as patches.

Names, and the order of the values of a patch, are those of `Siglip2ImageProcessor` in transformers.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import count

import torch
from torch.nn.functional import pad


@lru_cache(maxsize=4096)
def fit_grid(height: int, width: int, patch_size: tuple[int, int], max_num_patches: int) -> tuple[int, int]:
    """(rows, columns) of patches at the largest scale at which an image has at most `max_num_patches` of them.

    At scale s an image has ceil(s * height / patch height) rows: the last row is stretched to a whole one. The number
    of rows grows right after s = rows * patch height / height, and so on for the columns, so one of these is the scale.
    """
    patch_height, patch_width = patch_size
    grid = (1, 1)
    for rows in count(1):
        columns = -(-rows * patch_height * width // (height * patch_width))
        if rows * columns > max_num_patches:
            break
        grid = max(grid, (rows, columns))
    for columns in count(1):
        rows = -(-columns * patch_width * height // (width * patch_height))
        if rows * columns > max_num_patches:
            break
        grid = max(grid, (rows, columns))
    return grid


def patchify(images: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """(..., channels, height, width) -> (..., rows * columns, patch height * patch width * channels)."""
    patches = images.unflatten(-2, (-1, patch_size[0])).unflatten(-1, (-1, patch_size[1]))
    patches = patches.movedim(-5, -1).movedim(-3, -4)  # (..., rows, columns, patch height, patch width, channels)
    return patches.flatten(-3).flatten(-3, -2)


def pad_patches(patches: Sequence[torch.Tensor], length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Give several images the same number of patches.

    Args:
        patches: for each image (patches, values).
        length: the number of patches to pad with zeros to.

    Returns:
        For each image (length, values), and an int32 mask (length,) that is 1 at patches and 0 at padding.
    """
    padded = [pad(image, (0, 0, 0, length - len(image))) for image in patches]
    masks = [(torch.arange(length, device=image.device) < len(image)).int() for image in patches]
    return padded, masks
