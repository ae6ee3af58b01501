"""Where a model looks: attention maps, rollout, and how far each head looks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import pad

from ..models.configuration_hf_vit import HfViTConfig
from .observing import Images, batches, encoder_of, finite, observe, patch_pixels


def attention_distance(
    model: nn.Module,
    pixel_values: Images,
    *,
    renormalize: bool = False,
    batch_size: int | None = None,
    progress: bool = False,
) -> np.ndarray:
    """How far each head looks on average (Figure 7, right, and appendix D.7 of arXiv 2010.11929).

    The distance between a patch and the patches it attends to, weighted by the attention and averaged over patches and
    images. As in the authors' code (google-research/vision_transformer, issue 162) the class token is dropped as query
    and as key, without renormalising: what a head gives to the class token counts as no distance.

    Args:
        model: any model of this package.
        pixel_values: (images, channels, height, width), or an iterable of such batches, of processor outputs or of
            (pixel_values, labels). One layer's attentions of some images are held at a time, of any number of images.
        renormalize: divide by the attention that goes to patches, so that it is an average in the strict sense.
        batch_size: images at once; by default as many as keep a layer's attentions at 32 MiB.
        progress: show a progress bar.

    Returns:
        (layers, heads) in pixels of the image, float64.

    Raises:
        ValueError: the model has no attention, a weight is NaN, or the input is no batch of images.
    """
    encoder, total, count = encoder_of(model), 0.0, 0
    for images in batches(encoder, pixel_values, batch_size, progress):
        between = MeanDistance(encoder.config, images, renormalize)
        total = total + np.stack([sums.cpu().numpy() for sums in observe(encoder, images, between)[0]])
        count += len(images)
    return finite(model, np.asarray(total / count))


class MeanDistance:
    """(images, heads, tokens, tokens) of attention -> (heads,): mean distance over patches, summed over images."""

    def __init__(self, config: HfViTConfig, images: torch.Tensor, renormalize: bool):
        self.first_patch = config.num_prefix_tokens
        self.renormalize = renormalize
        grid = config.grid_of(*images.shape[-2:])
        self.distances = _patch_distances(grid, patch_pixels(config)).to(images.device)  # (patches, patches)

    def __call__(self, attentions: torch.Tensor) -> torch.Tensor:
        attentions = attentions[..., self.first_patch :, self.first_patch :]
        distances = (attentions * self.distances.to(attentions.dtype)).sum(dim=-1)  # (images, heads, patches)
        if self.renormalize:
            distances = distances / attentions.sum(dim=-1)
        return distances.double().mean(dim=-1).sum(dim=0)


def _patch_distances(grid: tuple[int, int], pixels: tuple[int, int]) -> torch.Tensor:
    """Euclidean distances between patches in pixels: (rows * columns, rows * columns), float64."""
    rows, columns = (torch.arange(size, dtype=torch.float64) * step for size, step in zip(grid, pixels, strict=True))
    row, column = (axis.flatten() for axis in torch.meshgrid(rows, columns, indexing="ij"))
    return torch.hypot(row[:, None] - row, column[:, None] - column)


def attention_maps(
    model: nn.Module,
    pixel_values: Images,
    *,
    query: tuple[int, int] | None = None,
    batch_size: int | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Where each head of each layer looks: the attention of one token to the patches.

    Args:
        model, pixel_values, batch_size, progress: as in `attention_distance`; all images of one size.
        query: the (row, column) of a patch that looks; by default the class token, or in a model without one the mean
            over all patches.

    Returns:
        (images, layers, heads, rows, columns) of attention probabilities. What goes to the class token is missing
        from their sum.
    """
    encoder, found = encoder_of(model), []
    prefix = encoder.config.num_prefix_tokens
    for images in batches(encoder, pixel_values, batch_size, progress):
        grid = encoder.config.grid_of(*images.shape[-2:])
        queries = _queries(query, grid, prefix)
        maps, _ = observe(encoder, images, lambda attentions, queries=queries: attentions[:, :, queries].mean(dim=2))
        stacked = torch.stack(maps, dim=1)[..., prefix:]  # (images, layers, heads, patches)
        found.append(stacked.unflatten(-1, grid).cpu().numpy())
    return finite(model, join(found))


def _queries(query: tuple[int, int] | None, grid: tuple[int, int], prefix: int) -> slice:
    """The tokens whose attention a map shows."""
    if query is None:
        return slice(0, 1 if prefix else None)
    row, column = query
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(f"query is {tuple(query)}; the image has {grid[0]} x {grid[1]} patches")
    token = prefix + row * grid[1] + column
    return slice(token, token + 1)


def attention_rollout(
    model: nn.Module,
    pixel_values: Images,
    *,
    identity: bool = True,
    batch_size: int | None = None,
    progress: bool = False,
) -> np.ndarray:
    """What of the image reaches the head, through all layers (Figure 6 and appendix D.8 of arXiv 2010.11929).

    Rollout of Abnar and Zuidema (arXiv 2005.00928): attentions averaged over heads, multiplied through the layers. As
    in the authors' code (google-research/vision_transformer, issue 18) the identity is added to each for the residual
    connection, and each row is divided by its sum. It starts from what the head sees: the class token, the mean of the
    tokens, or the tokens as the attention pooling weighs them.

    Args:
        model, pixel_values, batch_size, progress: as in `attention_distance`; all images of one size.
        identity: whether to add the identity; the paper's text does not mention it.

    Returns:
        (images, rows, columns): the share of each patch; every map sums to 1.
    """
    found = []
    for mixing, weights, grid in layer_mixing(model, pixel_values, identity, batch_size, progress):
        shares = weights.unsqueeze(1)  # (images, 1, tokens)
        for layer in reversed(mixing):
            shares = shares @ layer
        patches = shares[:, 0, -grid[0] * grid[1] :]
        found.append((patches / patches.sum(dim=1, keepdim=True)).unflatten(1, grid).cpu().numpy())
    return finite(model, join(found))


def layer_mixing(
    model: nn.Module, pixel_values: Images, identity: bool, batch_size: int | None, progress: bool
) -> Iterator[tuple[list[torch.Tensor], torch.Tensor, tuple[int, int]]]:
    """How tokens mix on their way to the head, batch by batch; see `attention_rollout`.

    Yields:
        For each layer (images, tokens, tokens) whose rows sum to 1; the share of each token that the head sees,
        (images, tokens); and the grid (rows, columns).
    """
    encoder = encoder_of(model)
    for images in batches(encoder, pixel_values, batch_size, progress):
        mixing, last_hidden_state = observe(encoder, images, lambda attentions: mix_heads(attentions, identity))
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
    """The share of each token in what the head sees: (images, tokens), rows sum to 1.

    Args:
        like: (images, tokens, tokens), in the dtype and on the device of the result.
    """
    images, tokens, _ = like.shape
    config, pooler = encoder.config, getattr(encoder, "pooler", None)
    if config.pooling == "map" and pooler is not None:
        seen = last_hidden_state[:, pooler.first_token :]
        return pad(_probe_attention(pooler.map, seen), (pooler.first_token, 0)).to(like.dtype)
    weights = like.new_zeros(images, tokens)
    if config.pooling == "cls":
        weights[:, 0] = 1
    else:
        first = config.num_prefix_tokens if pooler is None or config.pooling == "none" else pooler.first_token
        weights[:, first:] = 1 / (tokens - first)
    return weights


def _probe_attention(pooling: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Attention of the probe of MAP pooling, mean over heads: (images, tokens, hidden_size) -> (images, tokens)"""
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    query, key = (
        projection(states).unflatten(2, (pooling.num_heads, -1)).transpose(1, 2).to(wide)
        for projection, states in ((pooling.q_proj, pooling.probe), (pooling.k_proj, hidden_states))
    )  # (1, heads, 1, head_dim) and (images, heads, tokens, head_dim)
    scores = (query @ key.transpose(2, 3))[:, :, 0] * key.shape[-1] ** -0.5
    return scores.softmax(dim=-1).mean(dim=1)


def join(found: list[np.ndarray]) -> np.ndarray:
    """Maps of all batches in one array."""
    if len(shapes := sorted({maps.shape[1:] for maps in found})) > 1:
        raise ValueError(f"images of several sizes have maps of shapes {shapes}: pass images of one size at a time")
    return np.concatenate(found)
