"""Attention of a model, layer by layer: maps, rollout and distance.

Attentions are collected with hooks, for a tensor or any number of batches of images.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from ..models.configuration_hf_vit import HfViTConfig
from ..models.flexible_sizes import unpatchify
from ..models.relevance import token_weights
from ..models.sizes import as_pair

Reduced = TypeVar("Reduced")
# Input of the model: (images, channels, height, width), or batches of these, such as a DataLoader's.
Images = torch.Tensor | np.ndarray | Mapping | Iterable
# Maximum bytes of one layer's attentions, which limit the batch size; computing them takes about four times as much.
LAYER_BYTES = 32 * 2**20
_MAX_BATCH_SIZE = 32  # if attentions are small


class UnsupportedModel(ValueError):
    """Model without the part to analyze, such as attention or position embeddings."""


def encoder_of(model: nn.Module) -> Any:
    """Find the encoder (embeddings and layers) inside a classifier, LoRA or a compiled model.

    Raises:
        UnsupportedModel: there is no encoder.
    """
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if hasattr(module, "embeddings") and isinstance(layers, nn.ModuleList) and hasattr(layers[0], "attention"):
            return module
    raise UnsupportedModel(f"{type(model).__name__} has no layers with attention")


def batches(
    encoder: Any, pixel_values: Images, batch_size: int | None = None, progress: bool = False
) -> Iterator[torch.Tensor]:
    """Split images into batches (at most `batch_size`, channels, height, width), on the encoder's device.

    Args:
        batch_size: None: as many images as fit into `LAYER_BYTES`.

    Raises:
        ValueError: the input is not a batch of images of one size, nor images as patches (preset "native") of one size.
    """
    sources = [pixel_values] if isinstance(pixel_values, torch.Tensor | np.ndarray | Mapping) else pixel_values
    device = next(encoder.parameters()).device
    with tqdm(desc="attention", unit="image", disable=not progress, leave=False) as bar:
        for source in sources:
            images = as_images(source, encoder.config)
            rows, columns = encoder.config.grid_of(*images.shape[-2:])
            tokens = encoder.config.num_prefix_tokens + rows * columns
            fitting = LAYER_BYTES // (4 * encoder.config.num_attention_heads * tokens**2)
            for batch in images.split(batch_size or min(max(fitting, 1), _MAX_BATCH_SIZE)):
                yield batch.to(device)
                bar.update(len(batch))


def as_images(source: Any, config: HfViTConfig) -> torch.Tensor:
    """Convert the output of a processor or a data loader to (images, channels, height, width).

    Raises:
        ValueError: it has another shape.
    """
    if isinstance(source, Mapping):
        source = _unpatchify(source, config) if "spatial_shapes" in source else source["pixel_values"]
    elif isinstance(source, list | tuple):  # images and labels
        source = source[0]
    images = torch.as_tensor(source)
    if images.ndim != 4 or images.shape[1] != config.num_channels:
        raise ValueError(
            f"pixel_values has shape {tuple(images.shape)}; expected (images, {config.num_channels}, height, width)"
        )
    return images


def _unpatchify(source: Mapping, config: HfViTConfig) -> torch.Tensor:
    """Reassemble images of one size from their patches, without padding."""
    shapes = torch.as_tensor(source["spatial_shapes"]).unique(dim=0).tolist()
    if len(shapes) > 1:
        raise ValueError(f"the images have different grids of patches, {shapes}; pass images of one size at a time")
    rows, columns = shapes[0]
    patches = torch.as_tensor(source["pixel_values"])[:, : rows * columns]
    return unpatchify(patches, (rows, columns), patch_pixels(config))


@torch.inference_mode()
def collect_attentions(
    encoder: Any, images: torch.Tensor, reduce: Callable[[torch.Tensor], Reduced]
) -> tuple[list[Reduced], torch.Tensor | None]:
    """Run the encoder without dropout, and reduce the attentions of each layer when they are computed.

    Only one layer's attentions are in memory at a time. Any attention implementation is supported.

    Args:
        reduce: function of attentions (images, heads, tokens, tokens) in float32 at least.

    Returns:
        The results of `reduce`, first layer first; and the last hidden state (images, tokens, hidden_size) before the
        pooling, or None for a backbone.
    """
    reduced: list[Any] = []

    def request_attentions(_: nn.Module, arguments: tuple, options: dict) -> tuple[tuple, dict]:
        return arguments, {**options, "output_attentions": True}

    def reduce_attentions(_: nn.Module, arguments: tuple, output: tuple) -> None:
        attentions = output[1].to(torch.promote_types(output[1].dtype, torch.float32))
        reduced.append(reduce(attentions))

    with ExitStack() as restored:
        for module in encoder.modules():
            restored.callback(setattr, module, "training", module.training)
        for layer in encoder.layers:
            restored.enter_context(layer.attention.register_forward_pre_hook(request_attentions, with_kwargs=True))
            restored.enter_context(layer.attention.register_forward_hook(reduce_attentions))
        # output_attentions=False, or all would be collected; the hooks get them from the layers
        outputs = encoder.eval()(images, interpolate_pos_encoding=True, output_attentions=False)
    return reduced, getattr(outputs, "last_hidden_state", None)


def patch_pixels(config: HfViTConfig) -> tuple[int, int]:
    """Return (height, width) of a patch in pixels of the image, also with a stem."""
    height, width = as_pair(config.patch_size)
    return height * config.stride, width * config.stride


def check_finite(model: nn.Module, values: np.ndarray) -> np.ndarray:
    """Return the values if they are finite.

    Raises:
        ValueError: they are not; the message names the first weight that is not.
    """
    if np.isfinite(values).all():
        return values
    check_weights(model)
    raise ValueError("the attention is NaN or infinite, but all weights are finite; check the pixel values")


def check_weights(model: nn.Module) -> None:
    """Raise ValueError if a weight is NaN or infinite; the message names the first such tensor."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            count = int((~weight.isfinite()).sum())
            raise ValueError(f"{name} has {count:,} of {weight.numel():,} values that are NaN or infinite")


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
        sum_up = partial(summed_distances, config=encoder.config, image_size=images.shape[-2:], renormalize=renormalize)
        total = total + np.stack([sums.cpu().numpy() for sums in collect_attentions(encoder, images, sum_up)[0]])
        count += len(images)
    return check_finite(model, np.asarray(total / count))


def summed_distances(
    attentions: torch.Tensor, config: HfViTConfig, image_size: Sequence[int], renormalize: bool
) -> torch.Tensor:
    """Attention (images, heads, tokens, tokens) -> (heads,): mean distance over patches, summed over images."""
    sizes = zip(config.grid_of(*image_size), patch_pixels(config), strict=True)
    axes = [torch.arange(size, dtype=torch.float64, device=attentions.device) * step for size, step in sizes]
    places = torch.cartesian_prod(*axes)  # (patches, 2), in pixels
    attentions = attentions[..., config.num_prefix_tokens :, config.num_prefix_tokens :]
    between = (places[:, None] - places).norm(dim=-1).to(attentions.dtype)  # (patches, patches)
    distances = (attentions * between).sum(dim=-1)  # (images, heads, patches)
    if renormalize:
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
    return check_finite(model, np.concatenate(found))


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
    return check_finite(model, np.concatenate(found))


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
        return token_weights(pooler, last_hidden_state)
    weights = like.new_zeros(like.shape[:2])
    if config.pooling == "cls":
        weights[:, 0] = 1
    else:
        patches = weights[:, config.num_prefix_tokens :]
        patches[:] = 1 / patches.shape[1]
    return weights
