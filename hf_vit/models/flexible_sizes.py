"""Changes to the patch size (FlexiViT) and the image size, and batches of images of different sizes (NaFlex)."""

from copy import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from .ablations import PositionTables
from .configuration_hf_vit import HfViTConfig
from .modeling_hf_vit import HfViTPatchEmbeddings as PlainPatchEmbeddings
from .modeling_hf_vit import cached_on_device
from .pretrained import HfVisionPreTrainedModel
from .sizes import Grid, Size, as_pair


@cached_on_device
@torch.compiler.assume_constant_result
def _kernel_matrices(old_size: tuple[int, int], new_size: tuple[int, int]) -> list[torch.Tensor]:
    """Compute pinv(R^T) for the height and for the width, where R is the matrix of a bilinear resize of that axis.

    The resize has half-pixel centers and no antialiasing.

    Args:
        old_size, new_size: (height, width)

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

    This is FlexiViT's PI-resize (arXiv 2212.08013, section 3.4; `resample_patchemb` in big_vision,
    models/proj/flexi/vit.py). It multiplies the kernel by pinv(B^T), where B is the matrix of a bilinear resize of
    patches. B is the Kronecker product of one matrix per axis, so one small pseudo-inverse per axis is enough.
    The computation is in float32, or in float64 for a float64 kernel.

    Args:
        kernel: (hidden_size, channels, old_height, old_width)
        patch_size: (height, width)

    Returns:
        (hidden_size, channels, height, width), in the kernel's dtype.
    """
    old = (kernel.shape[2], kernel.shape[3])
    if old == tuple(patch_size):
        return kernel
    values = kernel.to(torch.promote_types(kernel.dtype, torch.float32))
    rows, columns = _kernel_matrices(old, tuple(patch_size), like=values)
    with maybe_autocast(kernel.device.type, enabled=False):
        resized = F.linear(F.linear(values, columns).transpose(2, 3), rows).transpose(2, 3)
    return resized.to(kernel.dtype)


class HfViTPatchEmbeddings(PlainPatchEmbeddings):
    """Linear embedding of patches of any size; the stored kernel is resized in each forward pass."""

    def __init__(self, config: HfViTConfig, num_channels: int):
        super().__init__(config, num_channels)
        self.config = config

    def forward(self, pixel_values: torch.Tensor, patch_size: tuple[int, int] | None = None) -> torch.Tensor:
        """(batch, channels, height, width) -> (batch, rows * columns, hidden_size)"""
        projection = self.projection
        if patch_size is None or patch_size == self.config.kernel_size:
            return super().forward(pixel_values)
        if not isinstance(projection, nn.Conv2d):  # PEFT's, whose low-rank part has no kernel to resize
            raise ValueError(f"the patch embedding has an adapter, which needs patch_size {self.config.kernel_size}")
        kernel = resize_patch_kernel(projection.weight, patch_size)
        patches = F.conv2d(pixel_values, kernel, projection.bias, stride=patch_size)
        return patches.flatten(2).transpose(1, 2)


class FlexibleSizes(HfVisionPreTrainedModel):
    """Methods that change a Vision Transformer's image size and patch size."""

    def set_patch_size(self, patch_size: Size, image_size: Size | None = None) -> None:
        """Set another patch size.

        In a flexible model (see `make_flexible`), only the configuration changes, so nothing is lost. In any other
        model, the kernel and the position embeddings are resized permanently.

        Args:
            patch_size: an int or (height, width) in pixels; for a hybrid, in pixels of the stem's feature map.
            image_size: new image size, an int or (height, width) in pixels; None: not changed.

        Raises:
            ValueError: the model is not flexible, and the image size is not a multiple of the patch size; the message
                names the nearest valid sizes.
        """
        config = self.config
        after = copy(config)
        after.patch_size = patch_size
        if image_size is not None:
            after.image_size = image_size
        if config.is_flexible:
            config.position_grid = config.stored_grid  # its default depends on the sizes, which change below
        else:
            self._resize_weights(as_pair(patch_size), after.grid_size)
            if as_pair(after.image_size) != as_pair(config.image_size):
                config.image_size_history = [*(config.image_size_history or []), config.image_size]
        config.patch_size = patch_size
        config.image_size = after.image_size

    def set_image_size(self, image_size: Size) -> None:
        self.set_patch_size(self.config.patch_size, image_size)

    @torch.no_grad()
    def drop_class_position(self) -> None:
        """Add the position of the class token to the token itself, and set `no_embed_class`; outputs do not change.

        For models with learned positions at the input.
        """
        embeddings: Any = self.base_model.embeddings
        table = embeddings.position_embeddings  # (1, 1 + patches, hidden_size)
        embeddings.cls_token += table[:, :1]
        embeddings.position_embeddings = nn.Parameter(table[:, 1:].clone(), table.requires_grad)
        self.config.no_embed_class = True

    def make_flexible(self) -> None:
        """Make the model flexible: from now on, each forward pass resizes the stored kernel and position embeddings.

        `position_interpolation` "jax", the default, becomes "bilinear", as in FlexiViT.
        """
        config = self.config
        if not config.is_flexible:
            if config.position_interpolation == "jax":
                config.position_interpolation = "bilinear"
            config.position_grid = config.grid_size
            config.stored_patch_size = config.patch_size

    def make_fixed(self) -> None:
        """Resize a flexible model's kernel and position embeddings permanently to the configured sizes."""
        config = self.config
        if config.is_flexible:
            grid = config.grid_of(*as_pair(config.image_size))  # raises ValueError for invalid sizes
            self._resize_weights(as_pair(config.patch_size), grid)
            config.stored_patch_size = config.position_grid = None

    @torch.no_grad()
    def _resize_weights(self, patch_size: tuple[int, int], grid: Grid) -> None:
        """Resize the kernel and the position embeddings permanently; the caller updates the configuration.

        Args:
            patch_size: (height, width)
            grid: (rows, columns) of patches.
        """
        embeddings: Any = self.base_model.embeddings
        projection = embeddings.patch_embeddings.projection
        kernel = projection.weight
        if patch_size != projection.kernel_size:
            projection.weight = nn.Parameter(resize_patch_kernel(kernel, patch_size), kernel.requires_grad)
            projection.kernel_size = projection.stride = patch_size
        if isinstance(table := embeddings.position_embeddings, nn.Parameter):
            resized = embeddings.position_embeddings_for(grid, table)
            embeddings.position_embeddings = nn.Parameter(resized, table.requires_grad)
        for module in self.modules():
            if isinstance(module, PositionTables):
                module.resample(grid)


def check_mixed_sizes(config: HfViTConfig) -> None:
    """Raise ValueError if the layers of the model need the same grid for all images of a batch."""
    if config.needs_one_grid:
        raise ValueError("mixed image sizes and dropped patches need all positions at the input and no axial attention")


def patch_mask(spatial_shapes: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return a mask (batch, patches), 1 for real patches and 0 for padding.

    Args:
        spatial_shapes: (batch, 2), rows and columns of patches of each image.
        pixel_values: (batch, patches, patch height * patch width * channels)
    """
    shapes = torch.as_tensor(spatial_shapes).to(pixel_values.device, non_blocking=True)
    index = torch.arange(pixel_values.shape[1], device=shapes.device)
    return (index < shapes.prod(dim=1, keepdim=True)).int()


def embed_mixed_sizes(
    embeddings: Any, pixel_values: torch.Tensor, spatial_shapes: Any, patch_size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Embed images of different sizes, given as patches, and compute the position embeddings of each image.

    The patches are joined into one row, so that the patch embedding is called once, whatever the image sizes. With
    sharded weights, every process must call the patch embedding the same number of times.

    Args:
        embeddings: an `HfViTEmbeddings`.
        pixel_values: (batch, patches, patch height * patch width * channels), padded with zeros.
        spatial_shapes: (batch, 2), rows and columns of patches of each image.
        patch_size: (height, width), for a hybrid in pixels of the stem's feature map.

    Returns:
        The patch embeddings (batch, patches, hidden_size), and the position embeddings
        (batch, num_prefix_positions + patches, hidden_size) or None; both are zero for padding.
    """
    config = embeddings.config
    _, length, values = pixel_values.shape
    check_mixed_sizes(config)
    height, width = (size * config.stride for size in patch_size)
    grids = [(rows, columns) for rows, columns in torch.as_tensor(spatial_shapes).tolist()]
    largest = max(rows * columns for rows, columns in grids)
    if values != height * width * config.num_channels or largest > length:
        raise ValueError(
            f"pixel_values has {length} patches of {values} values per image (expected {largest} or more, of "
            f"{height} x {width} pixels x {config.num_channels} channels)"
        )
    dtype = embeddings.patch_embeddings.projection.weight.dtype
    pixel_values = pixel_values.to(dtype)
    if embeddings.stem is None:
        row = unpatchify(pixel_values, (1, length), patch_size)
    else:
        row = _apply_stem(embeddings.stem, pixel_values, grids, patch_size, config.stride)
    patches = embeddings.patch_embeddings(row, patch_size).to(dtype)  # autocast changes the dtype
    patches = patches.masked_fill(patch_mask(spatial_shapes, pixel_values).unsqueeze(-1) == 0, 0)
    if not config.adds_positions_to_input:
        return patches, None
    tables = {}
    for grid in set(grids):
        table = embeddings.position_embeddings_for(grid, patches)[0]  # (positions, hidden_size)
        tables[grid] = F.pad(table, (0, 0, 0, config.num_prefix_positions + length - table.shape[0]))
    return patches, torch.stack([tables[grid] for grid in grids])


def _apply_stem(
    stem: Any, pixel_values: torch.Tensor, grids: list[Grid], patch_size: tuple[int, int], stride: int
) -> torch.Tensor:
    """Compute the stem's feature maps, with the patches of each image joined into one row.

    The stem needs whole images. Images of the same size are processed together.

    Args:
        pixel_values: (batch, patches, values)
        grids: (rows, columns) of each image.
        patch_size: (height, width) in pixels of the stem's feature map.
        stride: stride of the stem.

    Returns:
        (batch, stem.out_channels, patch height, patches * patch width)
    """
    height, width = patch_size
    batch, length, _ = pixel_values.shape
    row = pixel_values.new_zeros(batch, stem.out_channels, height, length * width)
    for rows, columns in set(grids):
        members = [index for index, grid in enumerate(grids) if grid == (rows, columns)]
        patches = pixel_values[members, : rows * columns]
        images = unpatchify(patches, (rows, columns), (height * stride, width * stride))
        maps = stem(images).unflatten(2, (rows, height)).transpose(2, 3).flatten(3)
        row[members, ..., : maps.shape[3]] = maps.to(row.dtype)
    return row


def keep_patches(tokens: torch.Tensor, keep: torch.Tensor, config: HfViTConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the class token and some of the patches.

    Args:
        tokens: (batch, tokens, hidden_size)
        keep: (batch, kept), indices of patches; negative for padding.

    Returns:
        (batch, num_prefix_tokens + kept, hidden_size), and a mask (batch, kept), 0 for padding.
    """
    check_mixed_sizes(config)
    prefix = config.num_prefix_tokens
    indices = F.pad(keep.clamp(min=0) + prefix, (prefix, 0))  # keeps the class token
    return tokens.take_along_dim(indices.unsqueeze(-1), dim=1), (keep >= 0).int()


def unpatchify(patches: torch.Tensor, grid: Grid, patch_size: tuple[int, int]) -> torch.Tensor:
    """(batch, rows * columns, patch height * patch width * channels) -> (batch, channels, height, width)"""
    images = patches.unflatten(2, (*patch_size, -1)).unflatten(1, grid)  # (batch, rows, columns, *patch_size, channels)
    return images.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
