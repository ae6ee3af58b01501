"""Analysis of the weights: the first filters, and the similarity of position embeddings."""

from typing import Any

import numpy as np
import torch
from torch import nn

from ..models.flexible_sizes import resize_patch_kernel
from ..models.resnet_stem import StandardizedConv2d, standardize
from ..models.sizes import Size, as_pair
from .attention import UnsupportedModel, check_finite


def embedding_filters(model: nn.Module, components: int = 28) -> np.ndarray:
    """Compute the principal components of the first filters (Figure 7, left, of arXiv 2010.11929).

    The filters are the patch embeddings, or in a hybrid the stem's root convolution with its standardized weights.
    Kernels are samples and their pixels variables; the mean kernel is subtracted.

    Args:
        model: any model of this package.
        components: largest number of components; there are no more than kernels, or values in each.

    Returns:
        (components, channels, height, width), unit vectors in the order of explained variance, float64. The sign is
        arbitrary; here the value of largest magnitude is positive.

    Example:
        >>> import hf_vit
        >>> from hf_vit.analysis import embedding_filters
        >>> model, processor = hf_vit.load("folder")
        >>> embedding_filters(model, components=5).shape
        (5, 3, 16, 16)
    """
    kernels = _first_kernels(model)
    samples = kernels.reshape(len(kernels), -1)
    check_finite(model, samples)
    axes = np.linalg.svd(samples - samples.mean(axis=0), full_matrices=False)[2][:components]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(axis=1, keepdims=True), axis=1)
    return (axes * np.sign(largest)).reshape(-1, *kernels.shape[1:])


def _first_kernels(model: nn.Module) -> np.ndarray:
    """Return the kernels of the first convolution as its forward uses them: (kernels, channels, height, width)."""
    convolution = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    weight = convolution.weight.detach().double()
    config: Any = model.config
    if isinstance(convolution, StandardizedConv2d):  # the root of a stem
        weight = standardize(weight, convolution.config)
    elif getattr(config, "is_flexible", False):
        weight = resize_patch_kernel(weight, as_pair(config.patch_size))
    return weight.cpu().numpy()


@torch.no_grad()
def position_similarity(model: nn.Module, image_size: Size | None = None) -> np.ndarray:
    """Compute the cosine similarity of the position embeddings of all pairs of patches.

    These are Figures 7 and 10 of arXiv 2010.11929. If every layer has its own table, it is the mean over the layers.

    Args:
        model: any model of this package.
        image_size: an int or (height, width) in pixels, to which learned positions are resampled; None: the model's
            own.

    Returns:
        (rows, columns, rows, columns), float64: [i, j] is the map of patch (i, j).

    Raises:
        ValueError: the model has no position embeddings, or relative ones, which belong to pairs of patches.

    Example:
        >>> from hf_vit import HfViTConfig, HfViTModel
        >>> from hf_vit.analysis import position_similarity
        >>> position_similarity(HfViTModel(HfViTConfig(num_hidden_layers=1))).shape
        (14, 14, 14, 14)
    """
    encoders: list[Any] = [module for module in model.modules() if hasattr(module, "layer_position_embeddings")]
    kind = encoders[0].config.position_embedding_type if encoders else "none"
    if kind in ("none", "relative"):
        raise UnsupportedModel(f"{type(model).__name__} has no position embeddings of patches (their type is {kind})")
    encoder, config = encoders[0], encoders[0].config
    grid = config.grid_of(*as_pair(config.image_size if image_size is None else image_size))
    tables = encoder.layer_position_embeddings  # None if they are added at the input
    if tables is None:
        positions = encoder.embeddings.position_embeddings_for(grid, next(model.parameters()))
    else:
        positions = tables(grid)
    patches = positions[:, config.num_prefix_positions :].double()
    directions = nn.functional.normalize(patches, dim=2)
    return check_finite(model, (directions @ directions.mT).mean(dim=0).cpu().numpy()).reshape(*grid, *grid)
