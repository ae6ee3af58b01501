"""Attentions of a model, collected layer by layer with hooks, for a tensor or any number of batches of images."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from ..models.configuration_hf_vit import HfViTConfig, as_pair
from ..models.flexible_sizes import unpatchify

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
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
    sources = [pixel_values] if isinstance(pixel_values, torch.Tensor | np.ndarray | Mapping) else pixel_values
    device = next(encoder.parameters()).device
    count = 0
    with tqdm(desc="attention", unit="image", disable=not progress, leave=False) as bar:
        for source in sources:
            images = as_images(source, encoder.config)
            rows, columns = encoder.config.grid_of(*images.shape[-2:])
            tokens = encoder.config.num_prefix_tokens + rows * columns
            fitting = LAYER_BYTES // (4 * encoder.config.num_attention_heads * tokens**2)
            for batch in images.split(batch_size or min(max(fitting, 1), _MAX_BATCH_SIZE)):
                yield batch.to(device)
                bar.update(len(batch))
            count += len(images)
    if not count:
        raise ValueError("there are no images")


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
        listed = ", ".join(f"{rows} x {columns}" for rows, columns in shapes)
        raise ValueError(f"the images have different grids ({listed} patches); pass images of one size at a time")
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

    def reduce_attentions(attention: nn.Module, _: tuple, output: tuple) -> None:
        attentions = output[1]
        if attentions is None:
            raise UnsupportedModel(f"{type(attention).__name__} of layer {len(reduced)} returns no attentions")
        reduced.append(reduce(attentions.to(torch.promote_types(attentions.dtype, torch.float32))))

    modes = {module: module.training for module in encoder.modules()}
    hooks = []
    for layer in encoder.layers:
        hooks.append(layer.attention.register_forward_pre_hook(request_attentions, with_kwargs=True))
        hooks.append(layer.attention.register_forward_hook(reduce_attentions))
    try:
        # output_attentions=False, or all would be collected; the hooks get them from the layers
        outputs = encoder.eval()(images, interpolate_pos_encoding=True, output_attentions=False)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
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
