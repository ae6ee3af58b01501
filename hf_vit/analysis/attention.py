"""Attention maps, attention rollout and attention distance of a model."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..models.configuration_hf_vit import HfViTConfig
from .attention_hooks import Images, batches, check_finite, collect_attentions, encoder_of, patch_pixels


def attention_distance(
    model: nn.Module,
    pixel_values: Images,
    *,
    renormalize: bool = False,
    batch_size: int | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Compute the mean attention distance of each head (Figure 7, right, and appendix D.7 of arXiv 2010.11929).

    This is the distance between a patch and the patches it attends to, weighted by the attention and averaged over
    patches and images. As in the authors' code (google-research/vision_transformer, issue 162), the class token is
    dropped as query and as key, without renormalizing: attention to the class token counts as distance 0.

    Args:
        model: any model of this package.
        pixel_values: (images, channels, height, width), or an iterable of such batches, of processor outputs or of
            (pixel_values, labels). Only one layer's attentions of one batch are in memory at a time.
        renormalize: divide by the attention to patches, which makes it a weighted mean in the strict sense.
        batch_size: images of a forward; None: as many as keep a layer's attentions below 32 MiB.
        progress: show a progress bar.

    Returns:
        (layers, heads) in pixels of the image, float64.

    Raises:
        ValueError: the model has no attention, a weight is NaN, or the input is not a batch of images.

    Example:
        >>> import hf_vit
        >>> from hf_vit.analysis import attention_distance
        >>> model, processor = hf_vit.load("folder")
        >>> distances = attention_distance(model, processor("photo.png", return_tensors="pt").pixel_values)
        >>> distances.shape == (model.config.num_hidden_layers, model.config.num_attention_heads)
        True
    """
    encoder, total, count = encoder_of(model), 0.0, 0
    for images in batches(encoder, pixel_values, batch_size, progress):
        between = MeanDistance(encoder.config, images, renormalize)
        total = total + np.stack([sums.cpu().numpy() for sums in collect_attentions(encoder, images, between)[0]])
        count += len(images)
    return check_finite(model, np.asarray(total / count))


class MeanDistance:
    """Attention (images, heads, tokens, tokens) -> (heads,): mean distance over patches, summed over images."""

    def __init__(self, config: HfViTConfig, images: torch.Tensor, renormalize: bool):
        self.first_patch = config.num_prefix_tokens
        self.renormalize = renormalize
        sizes = zip(config.grid_of(*images.shape[-2:]), patch_pixels(config), strict=True)
        axes = [torch.arange(size, dtype=torch.float64) * step for size, step in sizes]
        row, column = (axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij"))
        distances = torch.hypot(row[:, None] - row, column[:, None] - column)  # (patches, patches), in pixels
        self.distances = distances.to(images.device)

    def __call__(self, attentions: torch.Tensor) -> torch.Tensor:
        attentions = attentions[..., self.first_patch :, self.first_patch :]
        distances = (attentions * self.distances.to(attentions.dtype)).sum(dim=-1)  # (images, heads, patches)
        if self.renormalize:
            distances = distances / attentions.sum(dim=-1)
        return distances.double().mean(dim=-1).sum(dim=0)


def attention_maps(
    model: nn.Module,
    pixel_values: Images,
    *,
    query: tuple[int, int] | None = None,
    batch_size: int | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Compute attention maps: the attention of one token to the patches, for each head of each layer.

    Args:
        model, pixel_values, batch_size, progress: as in `attention_distance`; all images of one size.
        query: (row, column) of the patch that attends; None: the class token, or the mean over all patches in a model
            without class token.

    Returns:
        (images, layers, heads, rows, columns), attention probabilities. A map sums to less than 1 by the attention to
        the class token.

    Raises:
        ValueError: as in `attention_distance`; the images have several sizes; or there is no such patch.

    Example:
        >>> import hf_vit
        >>> from hf_vit.analysis import attention_maps
        >>> model, processor = hf_vit.load("folder")
        >>> maps = attention_maps(model, processor("photo.png", return_tensors="pt").pixel_values)
        >>> maps.shape[3:] == model.config.grid_size
        True
    """
    encoder, found = encoder_of(model), []
    prefix = encoder.config.num_prefix_tokens
    for images in batches(encoder, pixel_values, batch_size, progress):
        grid = encoder.config.grid_of(*images.shape[-2:])
        if query is None:
            queries = slice(0, 1 if prefix else None)
        elif 0 <= query[0] < grid[0] and 0 <= query[1] < grid[1]:
            token = prefix + query[0] * grid[1] + query[1]
            queries = slice(token, token + 1)
        else:
            raise ValueError(f"query is {tuple(query)}, but the image has {grid[0]} x {grid[1]} patches")
        maps, _ = collect_attentions(
            encoder, images, lambda attentions, queries=queries: attentions[:, :, queries].mean(dim=2)
        )
        stacked = torch.stack(maps, dim=1)[..., prefix:]  # (images, layers, heads, patches)
        found.append(stacked.unflatten(-1, grid).cpu().numpy())
    return check_finite(model, join(found))


def attention_rollout(
    model: nn.Module,
    pixel_values: Images,
    *,
    identity: bool = True,
    batch_size: int | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Compute attention rollout: the share of each patch in the head's input (Figure 6 of arXiv 2010.11929, D.8).

    Attentions are averaged over heads and multiplied through the layers (Abnar and Zuidema, arXiv 2005.00928). As in
    the authors' code (google-research/vision_transformer, issue 18), the identity is added to each layer for the
    residual connection, and each row is divided by its sum. The product starts from the head's input: the class token,
    the mean of the tokens, or the tokens with the weights of the attention pooling.

    Args:
        model, pixel_values, batch_size, progress: as in `attention_distance`; all images of one size.
        identity: add the identity; the paper's text does not mention it.

    Returns:
        (images, rows, columns): the share of each patch; every map sums to 1.

    Raises:
        ValueError: as in `attention_distance`, or the images have several sizes.

    Example:
        >>> import hf_vit
        >>> from hf_vit.analysis import attention_rollout
        >>> model, processor = hf_vit.load("folder")
        >>> shares = attention_rollout(model, processor("photo.png", return_tensors="pt").pixel_values)
        >>> round(float(shares.sum()), 3)
        1.0
    """
    found = []
    for mixing, weights, grid in layer_mixing(model, pixel_values, identity, batch_size, progress):
        shares = weights.unsqueeze(1)  # (images, 1, tokens)
        for layer in reversed(mixing):
            shares = shares @ layer
        patches = shares[:, 0, -grid[0] * grid[1] :]
        found.append((patches / patches.sum(dim=1, keepdim=True)).unflatten(1, grid).cpu().numpy())
    return check_finite(model, join(found))


def layer_mixing(
    model: nn.Module, pixel_values: Images, identity: bool, batch_size: int | None, progress: bool
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor, tuple[int, int]]]:
    """Compute the mixing of tokens in each layer, batch by batch; see `attention_rollout`.

    Yields:
        For each layer (images, tokens, tokens), whose rows sum to 1; the share of each token in the head's input,
        (images, tokens); and the grid (rows, columns).
    """
    encoder = encoder_of(model)
    for images in batches(encoder, pixel_values, batch_size, progress):
        mixing, last_hidden_state = collect_attentions(
            encoder, images, lambda attentions: mix_heads(attentions, identity)
        )
        weights = pooling_weights(encoder, mixing[0], last_hidden_state)
        yield mixing, weights, encoder.config.grid_of(*images.shape[-2:])


def mix_heads(attentions: torch.Tensor, identity: bool) -> torch.Tensor:
    """(images, heads, tokens, tokens) -> (images, tokens, tokens), rows sum to 1"""
    mixing = attentions.mean(dim=1)
    if identity:
        mixing = mixing + torch.eye(mixing.shape[-1], dtype=mixing.dtype, device=mixing.device)
    return mixing / mixing.sum(dim=-1, keepdim=True)


@torch.inference_mode()
def pooling_weights(encoder: Any, like: torch.Tensor, last_hidden_state: Any) -> torch.Tensor:
    """Return the share of each token in the head's input: (images, tokens), rows sum to 1.

    Args:
        like: (images, tokens, tokens), in the dtype and on the device of the result.
    """
    config, pooler = encoder.config, getattr(encoder, "pooler", None)
    if pooler is not None and config.pooling != "none":
        return pooler.token_weights(last_hidden_state)
    weights = like.new_zeros(like.shape[:2])
    if config.pooling == "cls":
        weights[:, 0] = 1
    else:
        patches = weights[:, config.num_prefix_tokens :]
        patches[:] = 1 / patches.shape[1]
    return weights


def join(found: list[np.ndarray]) -> np.ndarray:
    """Concatenate the maps of all batches."""
    if len(shapes := sorted({maps.shape[1:] for maps in found})) > 1:
        raise ValueError(f"the images have different sizes, with maps of {shapes}; pass images of one size at a time")
    return np.concatenate(found)
