"""Other patch sizes (FlexiViT), other image sizes, and images of different sizes in one batch (NaFlex)."""

from copy import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from .configuration_hf_vision import Size, as_pair
from .configuration_hf_vit import HfViTConfig
from .position_embeddings import Grid, PositionTables, constant
from .pretrained import HfVisionPreTrainedModel


@constant
@torch.compiler.assume_constant_result
def _kernel_matrices(old_size: tuple[int, int], new_size: tuple[int, int]) -> list[torch.Tensor]:
    """Compute pinv(R^T) of a bilinear resize R (half-pixel centers, no antialias) of rows, and of columns.

    Returns:
        (new_height, old_height) and (new_width, old_width), float64.
    """
    matrices = []
    for old, new in zip(old_size, new_size, strict=True):
        centers = ((np.arange(new) + 0.5) * old / new - 0.5).clip(0, old - 1)
        resize = (1 - np.abs(centers[:, None] - np.arange(old))).clip(min=0)  # (new, old), every row sums to 1
        matrices.append(torch.from_numpy(np.linalg.pinv(resize.T)))
    return matrices


def resize_patch_kernel(kernel: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """Resize the kernel of a patch embedding, so that resized patches have nearly the same embeddings.

    This is PI-resize of FlexiViT (arXiv 2212.08013, section 3.4; `resample_patchemb` in big_vision,
    models/proj/flexi/vit.py): pinv(B^T) times the kernel, where B is the matrix of a bilinear resize of patches. B is
    the Kronecker product of one matrix per axis, so each axis has a small pseudo-inverse. Computed in float32 at least.

    Args:
        kernel: (hidden_size, channels, old_height, old_width)
        patch_size: (height, width)

    Returns:
        (hidden_size, channels, height, width), in the dtype of the input.
    """
    old = (kernel.shape[2], kernel.shape[3])
    if old == tuple(patch_size):
        return kernel
    wide = kernel.to(torch.promote_types(kernel.dtype, torch.float32))
    rows, columns = _kernel_matrices(old, tuple(patch_size), like=wide)
    with maybe_autocast(kernel.device.type, enabled=False):
        resized = F.linear(F.linear(wide, columns).transpose(2, 3), rows).transpose(2, 3)
    return resized.to(kernel.dtype)


class FlexibleSizes(HfVisionPreTrainedModel):
    """Changes of the image size and the patch size of a Vision Transformer, permanent or for one forward."""

    def set_patch_size(self, patch_size: Size, image_size: Size | None = None, processor_follows: bool = False) -> None:
        """Set another patch size.

        A flexible model changes only its configuration, any number of times without loss. In any other model, kernel
        and position embeddings are resized permanently; see `make_flexible`.

        Args:
            patch_size: an int or (height, width) in pixels; for a hybrid, in pixels of the stem's map.
            image_size: another image size, an int or (height, width) in pixels; None keeps it.
            processor_follows: as in `set_image_size`.

        Raises:
            ValueError: the patches do not divide the image size of a model that is not flexible; the message names
                the nearest sizes.
        """
        before = self.config.image_size
        self._set_sizes(patch_size, before if image_size is None else image_size)
        self._warn_of_new_size(before, processor_follows)

    def make_flexible(self) -> None:
        """Keep kernel and position embeddings as stored from now on; each forward resizes them to the sizes in use.

        Positions with the default interpolation, "jax", are interpolated "bilinear" from now on, as in FlexiViT.
        """
        config = self.config
        if not config.is_flexible:
            if config.position_interpolation == "jax":
                config.position_interpolation = "bilinear"
            config.position_grid = config.grid_size
            config.stored_patch_size = config.patch_size

    def make_fixed(self) -> None:
        """Resize kernel and position embeddings of a flexible model permanently to the configured sizes."""
        config = self.config
        if config.is_flexible:
            grid = config.grid_of(*as_pair(config.image_size))  # raises if the patches do not divide it
            self._resize_weights(as_pair(config.patch_size), grid)
            config.stored_patch_size = config.position_grid = None

    def _apply_image_size(self, image_size: Size) -> None:
        self._set_sizes(self.config.patch_size, image_size)

    def _set_sizes(self, patch_size: Size, image_size: Size) -> None:
        config, after = self.config, copy(self.config)
        after.patch_size, after.image_size = patch_size, image_size
        if config.is_flexible:
            config.position_grid = config.stored_grid  # before the sizes change, on which its default depends
        else:
            self._resize_weights(as_pair(patch_size), after.grid_size)
            if as_pair(image_size) != as_pair(config.image_size):
                config.image_size_history = [*(config.image_size_history or []), config.image_size]
        config.patch_size, config.image_size = patch_size, image_size

    @torch.no_grad()
    def _resize_weights(self, patch_size: tuple[int, int], grid: Grid) -> None:
        """Resize kernel and position embeddings permanently; the caller updates the configuration."""
        embeddings: Any = self.base_model.embeddings
        projection = embeddings.patch_embeddings.projection
        kernel = projection.weight
        if patch_size != projection.kernel_size:
            projection.weight = nn.Parameter(resize_patch_kernel(kernel, patch_size), kernel.requires_grad)
            projection.kernel_size = projection.stride = patch_size
        if isinstance(table := embeddings.position_embeddings, nn.Parameter):
            resized = embeddings.positions_on(grid, table)
            embeddings.position_embeddings = nn.Parameter(resized, table.requires_grad)
        for module in self.modules():
            if isinstance(module, PositionTables):
                module.resample(grid)


def refuse_mixed_sizes(config: HfViTConfig) -> None:
    """Raise ValueError for a model whose layers need the same grid for all images of a batch."""
    if config.needs_one_grid:
        raise ValueError(
            "cannot mix image sizes in a batch: this needs position embeddings at the input and attention over all "
            f"tokens, not position_embedding_type {config.position_embedding_type!r} with position_embedding_placement "
            f"{config.position_embedding_placement!r} and attention_axes {config.attention_axes!r}"
        )


def patch_mask(spatial_shapes: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return (batch, patches), 1 for the patches that an image has.

    Args:
        spatial_shapes: (batch, 2), rows and columns of patches of each image.
        pixel_values: (batch, patches, values)
    """
    shapes = torch.as_tensor(spatial_shapes).to(pixel_values.device, non_blocking=True)
    index = torch.arange(pixel_values.shape[1], device=shapes.device)
    return (index < shapes.prod(dim=1, keepdim=True)).int()


def embed_mixed_sizes(
    embeddings: Any, pixel_values: torch.Tensor, spatial_shapes: Any, patch_size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Embed images of different sizes, given as patches, with positions for the grid of each.

    All patches lie in one row, so that there is one call of the patch embedding whatever the sizes: with sharded
    weights, every process must make the same number of calls.

    Args:
        embeddings: an `HfViTEmbeddings`.
        pixel_values: (batch, patches, patch height * patch width * channels), zeros where an image has no patch.
        spatial_shapes: (batch, 2), rows and columns of patches of each image.
        patch_size: (height, width), in pixels of the stem's map in a hybrid.

    Returns:
        (batch, patches, hidden_size), and positions (batch, tokens, hidden_size) or None; both zero where an image has
        no patch.
    """
    config, (_, length, values) = embeddings.config, pixel_values.shape
    refuse_mixed_sizes(config)
    height, width = (size * config.stride for size in patch_size)
    if values != height * width * config.num_channels:
        raise ValueError(
            f"pixel_values has {values} values per patch; patches of {height} x {width} pixels with "
            f"{config.num_channels} channels have {height * width * config.num_channels}"
        )
    grids = [(rows, columns) for rows, columns in torch.as_tensor(spatial_shapes).tolist()]
    if max(rows * columns for rows, columns in grids) > length:
        raise ValueError(f"spatial_shapes has grids with more patches than the {length} of pixel_values: {grids}")
    dtype = embeddings.patch_embeddings.projection.weight.dtype
    pixel_values = pixel_values.to(dtype)
    if embeddings.stem is None:
        row = unpatchify(pixel_values, (1, length), patch_size)
    else:
        row = _stem_row(embeddings.stem, pixel_values, grids, patch_size, config.stride)
    patches = embeddings.patch_embeddings(row, patch_size).to(dtype)  # they are bfloat16 under autocast
    patches = patches.masked_fill(patch_mask(spatial_shapes, pixel_values).unsqueeze(-1) == 0, 0)
    if not config.adds_positions_to_input:
        return patches, None
    tables = {}
    for grid in set(grids):
        table = embeddings.positions_on(grid, patches)[0]  # (tokens, hidden_size)
        tables[grid] = F.pad(table, (0, 0, 0, config.num_prefix_tokens + length - table.shape[0]))
    return patches, torch.stack([tables[grid] for grid in grids])


def _stem_row(
    stem: Any, pixel_values: torch.Tensor, grids: list[Grid], patch_size: tuple[int, int], stride: int
) -> torch.Tensor:
    """(batch, patches, values) -> (batch, channels, patch height, patches * patch width) of the stem's map

    The stem needs whole images: those of the same size go through it together.
    """
    (height, width), (batch, length, _) = patch_size, pixel_values.shape
    row = pixel_values.new_zeros(batch, stem.out_channels, height, length * width)
    for rows, columns in set(grids):
        members = [index for index, grid in enumerate(grids) if grid == (rows, columns)]
        patches = pixel_values[members, : rows * columns]
        images = unpatchify(patches, (rows, columns), (height * stride, width * stride))
        maps = stem(images).unflatten(2, (rows, height)).transpose(2, 3).flatten(3)
        row[members, ..., : maps.shape[3]] = maps.to(row.dtype)
    return row


def keep_patches(
    tokens: torch.Tensor, kept_patches: torch.Tensor, config: HfViTConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select some of the patches, after the class token.

    Args:
        tokens: (batch, tokens, hidden_size)
        kept_patches: (batch, kept), indices of patches; below 0 for padding.

    Returns:
        (batch, kept tokens, hidden_size), and a mask (batch, kept) that is 0 at padding.
    """
    refuse_mixed_sizes(config)
    prefix = config.num_prefix_tokens
    indices = F.pad(kept_patches.clamp(min=0) + prefix, (prefix, 0))  # a class token comes first
    return tokens.take_along_dim(indices.unsqueeze(-1), dim=1), (kept_patches >= 0).int()


def unpatchify(patches: torch.Tensor, grid: Grid, patch_size: tuple[int, int]) -> torch.Tensor:
    """(batch, rows * columns, patch height * patch width * channels) -> (batch, channels, height, width)"""
    images = patches.unflatten(2, (*patch_size, -1)).unflatten(1, grid)  # (batch, rows, columns, *patch_size, channels)
    return images.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
