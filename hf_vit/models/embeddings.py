"""Embeddings, from an image to tokens: ResNet stem, patches, class token, position embeddings."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .configuration_hf_vision import Size
from .configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from .position_embeddings import (
    Grid,
    PositionTables,
    build_tables,
    is_same,
    resize_position_embeddings,
    sincos2d,
)
from .pretrained import is_recorded
from .resnet_stem import ResNetStem, stem_numbers

_CACHED_GRIDS = 16


@cache  # of NumPy arrays, so that tracing a model cannot put one of its own tensors into the cache
def _kernel_matrix(old: int, new: int) -> np.ndarray:
    """Compute pinv(R^T) of a bilinear resize R (half-pixel centres, no antialias): (new, old), in float64."""
    centres = ((np.arange(new) + 0.5) * old / new - 0.5).clip(0, old - 1)
    resize = (1 - np.abs(centres[:, None] - np.arange(old))).clip(min=0)  # (new, old), every row sums to 1
    return np.linalg.pinv(resize.T)


@torch.compiler.assume_constant_result
def _kernel_matrices(old: tuple[int, int], new: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.from_numpy(_kernel_matrix(*sizes)) for sizes in zip(old, new, strict=True)]


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
    rows, columns = (matrix.to(wide) for matrix in _kernel_matrices(old, patch_size))
    with torch.autocast(kernel.device.type, enabled=False):
        resized = F.linear(F.linear(wide, columns).transpose(2, 3), rows).transpose(2, 3)
    return resized.to(kernel.dtype)


class HfViTPatchProjection(nn.Conv2d):
    """Convolution that embeds patches; its kernel can be resized for one forward, or permanently."""

    def forward(self, pixel_values: torch.Tensor, patch_size: tuple[int, int] | None = None) -> torch.Tensor:
        """(batch, channels, height, width) -> (batch, hidden_size, rows, columns)"""
        if patch_size is None:
            return super().forward(pixel_values)
        return F.conv2d(pixel_values, resize_patch_kernel(self.weight, patch_size), self.bias, stride=patch_size)

    @torch.no_grad()
    def resize(self, patch_size: tuple[int, int]) -> None:
        """Resize the kernel permanently to (height, width)."""
        if patch_size == self.kernel_size:
            return
        self.weight = nn.Parameter(resize_patch_kernel(self.weight, patch_size), self.weight.requires_grad)
        self.kernel_size = self.stride = patch_size


class HfViTPatchEmbeddings(nn.Module):
    """Patch embedding of an image or of the stem's map, row by row."""

    def __init__(self, config: HfViTConfig, num_channels: int):
        super().__init__()
        self.config = config
        kernel_size = config.kernel_size
        self.projection = HfViTPatchProjection(num_channels, config.hidden_size, kernel_size, stride=kernel_size)

    def forward(self, pixel_values: torch.Tensor, patch_size: Size | None = None) -> torch.Tensor:
        """(batch, channels, height, width) -> (batch, rows * columns, hidden_size)"""
        patches = self.config.patches_of(patch_size)
        resized = () if patches == self.config.kernel_size else (patches,)
        return self.projection(pixel_values, *resized).flatten(2).transpose(1, 2)


class HfViTEmbeddings(nn.Module):
    """Embeddings of an image as tokens: ResNet stem (hybrids), patches, class token, position embeddings.

    Args:
        use_mask_token: add a mask token, which can replace patches.
    """

    def __init__(self, config: HfViTConfig, use_mask_token: bool = False):
        super().__init__()
        self.config = config
        self.stem = None
        map_channels = config.num_channels
        if config.model_type == HfViTHybridConfig.model_type:  # not isinstance: remote code may load a second class
            self.stem = ResNetStem(config.num_channels, config.stem_width, config.stem_depths, stem_numbers(config))
            map_channels = self.stem.out_channels
        self.patch_embeddings = HfViTPatchEmbeddings(config, map_channels)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if config.use_cls_token else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if use_mask_token else None
        self.position_embeddings = None
        if config.adds_positions_to_input and config.position_embedding_type == "learned":
            self.position_embeddings = nn.Parameter(self._empty_positions(config.stored_grid))
        elif config.adds_positions_to_input and config.position_embedding_type == "learned2d":
            self.position_embeddings = build_tables(config, count=1)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self._tables: dict[tuple, tuple[Any, torch.Tensor]] = {}

    def initialize(self) -> None:
        """Draw the position embeddings; set the tokens to zero."""
        if isinstance(self.position_embeddings, nn.Parameter):
            init.normal_(self.position_embeddings, std=self.config.initializer_range)
        if self.cls_token is not None:
            init.zeros_(self.cls_token)
        if self.mask_token is not None:
            init.zeros_(self.mask_token)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, to which images are converted."""
        return self.patch_embeddings.projection.weight.dtype

    def forward(
        self,
        pixel_values: torch.Tensor,
        spatial_shapes: torch.Tensor | None = None,
        patch_size: Size | None = None,
        bool_masked_pos: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embed images, or images of several shapes that are given as patches.

        Args:
            pixel_values: (batch, num_channels, height, width); with `spatial_shapes` (batch, patches, values), see
                `HfViTImageProcessor` with the preset "native".
            spatial_shapes: (batch, 2), rows and columns of patches of each image.
            patch_size: patch size of this forward, for a flexible model; see `HfViTConfig.patches_of`.
            bool_masked_pos: (batch, patches), true for the patches that the mask token replaces.

        Returns:
            (batch, tokens, hidden_size)
        """
        if spatial_shapes is not None:
            refuse_several_shapes(self.config)
            patches, positions = self.as_padded_patches(pixel_values, spatial_shapes, patch_size)
            return self.as_tokens(self._mask(patches, bool_masked_pos), positions)
        patches = self._mask(self.as_patches(pixel_values, patch_size), bool_masked_pos)
        grid = self.config.grid_of(*size_of(pixel_values), patch_size=patch_size)
        return self.as_tokens(patches, self.positions_on(grid, patches))

    def as_patches(self, pixel_values: torch.Tensor, patch_size: Size | None = None) -> torch.Tensor:
        """(batch, num_channels, height, width) -> (batch, rows * columns, hidden_size), in the dtype of the weights"""
        self.config.check_images(pixel_values.shape)
        self.config.grid_of(*size_of(pixel_values), patch_size=patch_size)  # raises if the patches do not divide it
        feature_map = pixel_values.to(self.dtype)
        return self.patch_embeddings(feature_map if self.stem is None else self.stem(feature_map), patch_size)

    def as_padded_patches(
        self, pixel_values: torch.Tensor, spatial_shapes: torch.Tensor, patch_size: Size | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(batch, patches, values) -> (batch, patches, hidden_size) and positions, zero where there is no patch

        The patches of an image are laid out in one row. Whatever the shapes in a batch, they are embedded in one call:
        with sharded weights, every process must make the same number of calls.
        """
        patch = self.config.patches_of(patch_size)
        height, width = (size * self.config.stride for size in patch)
        length, values = pixel_values.shape[1:]
        if values != height * width * self.config.num_channels:
            raise ValueError(
                f"pixel_values has {values} values per patch; patches of {height} x {width} pixels with "
                f"{self.config.num_channels} channels have {height * width * self.config.num_channels}"
            )
        grids = [(rows, columns) for rows, columns in spatial_shapes.tolist()]
        if max(rows * columns for rows, columns in grids) > length:
            raise ValueError(f"spatial_shapes has grids with more patches than the {length} of pixel_values: {grids}")
        pixel_values = pixel_values.to(self.dtype)
        if self.stem is None:
            row = unpatchify(pixel_values, (1, length), patch)
        else:
            row = self._stem_row(pixel_values, grids, patch)
        patches = self.patch_embeddings(row, patch_size)
        counts = spatial_shapes.to(patches.device).prod(dim=1, keepdim=True)
        padding = torch.arange(length, device=patches.device) >= counts  # (batch, patches)
        patches = patches.to(self.dtype).masked_fill(padding.unsqueeze(-1), 0)  # they are bfloat16 under autocast
        if not self.config.adds_positions_to_input:
            return patches, None
        tables = {grid: self._padded_positions(grid, patches) for grid in set(grids)}
        return patches, torch.stack([tables[grid] for grid in grids])

    def _stem_row(self, pixel_values: torch.Tensor, grids: list[Grid], patch: tuple[int, int]) -> torch.Tensor:
        """(batch, patches, values) -> (batch, channels, patch height, patches * patch width) of the stem's map

        The stem needs whole images: those of the same shape go through it together.
        """
        assert self.stem is not None
        (height, width), (batch, length, _) = patch, pixel_values.shape
        row = pixel_values.new_zeros(batch, self.stem.out_channels, height, length * width)
        for rows, columns in set(grids):
            members = [index for index, grid in enumerate(grids) if grid == (rows, columns)]
            image_patch = (height * self.config.stride, width * self.config.stride)
            images = unpatchify(pixel_values[members, : rows * columns], (rows, columns), image_patch)
            maps = self.stem(images).unflatten(2, (rows, height)).transpose(2, 3).flatten(3)
            row[members, ..., : maps.shape[3]] = maps.to(row.dtype)
        return row

    def _padded_positions(self, grid: Grid, patches: torch.Tensor) -> torch.Tensor:
        """Position embeddings on a grid: (tokens, hidden_size), with zeros up to the tokens of the longest image."""
        table: Any = self.positions_on(grid, patches)
        return F.pad(table[0], (0, 0, 0, self.config.num_prefix_tokens + patches.shape[1] - table.shape[1]))

    def _mask(self, patches: torch.Tensor, bool_masked_pos: torch.Tensor | None) -> torch.Tensor:
        """(batch, patches, hidden_size) -> the same, with the mask token in the masked places"""
        if bool_masked_pos is None:
            return patches
        check_mask(bool_masked_pos, patches)
        if self.mask_token is None:
            raise ValueError("bool_masked_pos needs a mask token; build or load the model with use_mask_token=True")
        return torch.where(bool_masked_pos.bool().unsqueeze(-1), self.mask_token.to(patches.dtype), patches)

    def as_tokens(self, patches: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """(batch, patches, hidden_size) -> (batch, tokens, hidden_size): class token and positions added"""
        if self.cls_token is not None:
            patches = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        return self.dropout(patches if positions is None else patches + positions)

    def keep(self, tokens: torch.Tensor, kept_patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Select some of the patches, after the class token.

        Args:
            tokens: (batch, tokens, hidden_size)
            kept_patches: (batch, kept), indices of patches; below 0 for padding.

        Returns:
            (batch, kept tokens, hidden_size), and a mask (batch, kept) that is 0 at padding.
        """
        refuse_several_shapes(self.config)
        prefix = self.config.num_prefix_tokens
        places = F.pad(kept_patches.clamp(min=0) + prefix, (prefix, 0))  # a class token has the place 0
        return tokens.take_along_dim(places.unsqueeze(-1), dim=1), (kept_patches >= 0).int()

    def positions_on(self, grid: Grid, like: torch.Tensor) -> torch.Tensor | None:
        """Return the position embeddings on any grid of patches, resampled where it is not the stored one.

        Args:
            like: a tensor with the dtype and on the device of fixed positions.

        Returns:
            (1, tokens, hidden_size); None if the model adds none here.
        """
        if not self.config.adds_positions_to_input:
            return None
        if isinstance(self.position_embeddings, PositionTables):
            return self.position_embeddings(grid)
        if self.position_embeddings is not None and is_same(grid, self.config.stored_grid):
            return self.position_embeddings
        stored = self.position_embeddings
        # A cached result holds while the stored table is equal to its copy (a version counter can miss changes). A GPU
        # would have to finish all earlier work for this comparison, and resampling there is quick.
        is_on_accelerator = stored is not None and stored.device.type != "cpu"
        if torch.is_grad_enabled() or is_recorded() or is_on_accelerator:
            return self._make_positions(stored, grid, like)
        source = like if stored is None else stored
        key = (grid, source.dtype, source.device, self.config.position_interpolation)
        kept = self._tables.get(key)
        if kept is None or (stored is not None and not torch.equal(stored, kept[0])):
            if len(self._tables) == _CACHED_GRIDS:
                self._tables.clear()
            kept = None if stored is None else stored.clone(), self._make_positions(stored, grid, like)
            self._tables[key] = kept
        return kept[1]

    def _make_positions(self, stored: torch.Tensor | None, grid: Grid, like: torch.Tensor) -> torch.Tensor:
        if stored is not None:
            return self.resample(stored, grid)
        table = sincos2d(grid, self.config.hidden_size).to(like)
        return F.pad(table, (0, 0, self.config.num_prefix_tokens, 0))  # zeros for the class token

    @torch.no_grad()
    def resize(self, patch_size: tuple[int, int], grid: Grid) -> None:
        """Resize the kernel and this module's table permanently; the caller updates the configuration."""
        self.patch_embeddings.projection.resize(patch_size)
        if isinstance(table := self.position_embeddings, nn.Parameter):
            self.position_embeddings = nn.Parameter(self.resample(table, grid), table.requires_grad)

    def resample(self, stored: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Return the learned table on another grid, (1, tokens, hidden_size)."""
        config = self.config
        return resize_position_embeddings(
            stored, config.stored_grid, grid, config.num_prefix_tokens, config.position_interpolation
        )

    def _empty_positions(self, grid: Grid) -> torch.Tensor:
        return torch.zeros(1, self.config.num_prefix_tokens + grid[0] * grid[1], self.config.hidden_size)


def size_of(pixel_values: torch.Tensor) -> tuple[int, int]:
    """(height, width) of images (batch, channels, height, width); `torch.jit.trace` makes tensors of them."""
    height, width = pixel_values.shape[-2:]
    is_traced = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - it is documented
    return (int(height), int(width)) if is_traced else (height, width)


def check_mask(bool_masked_pos: Any, patches: torch.Tensor) -> None:
    """Raise ValueError unless the mask is (batch, patches), as the patches (batch, patches, hidden_size)."""
    shape = tuple(getattr(bool_masked_pos, "shape", ()))
    if shape != tuple(patches.shape[:2]):
        raise ValueError(f"bool_masked_pos has shape {shape}; expected (batch, patches), {tuple(patches.shape[:2])}")


def refuse_several_shapes(config: HfViTConfig) -> None:
    """Raise ValueError for a model whose layers need the same grid for all images of a batch."""
    if config.needs_one_grid:
        raise ValueError(
            "cannot mix image shapes in a batch: this needs position embeddings at the input and attention over all "
            f"tokens, not position_embedding_type {config.position_embedding_type!r} with position_embedding_placement "
            f"{config.position_embedding_placement!r} and attention_axes {config.attention_axes!r}"
        )


def unpatchify(patches: torch.Tensor, grid: Grid, patch_size: tuple[int, int]) -> torch.Tensor:
    """(batch, rows * columns, patch height * patch width * channels) -> (batch, channels, height, width)"""
    images = patches.unflatten(2, (*patch_size, -1)).unflatten(1, grid)  # (batch, rows, columns, *patch_size, channels)
    return images.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
