"""From what a user passes to a list of images, and from the processed images back to a batch."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from .image_presets import as_pair
from .native_resolution import pad_patches, patchify


def list_images(images: Any, device: Any = None) -> list[Any]:
    """A flat list of images. A batch in one tensor on an accelerator stays whole, since there few large steps are
    faster; on the CPU many small ones are, that stay in its cache."""
    if isinstance(images, list | tuple):
        images = [image for item in images for image in list_images(item, device)]
        return [torch.stack(images)] if can_stack(images) else images
    if isinstance(images, np.ndarray | torch.Tensor) and images.ndim == 4:
        on_cpu = torch.device(device or getattr(images, "device", "cpu")).type == "cpu"
        return list(images) if on_cpu else [images]
    return [images]


def count_images(images: list[Any]) -> int:
    """How many images a list has in which batches count with all of theirs."""
    return sum(len(image) if getattr(image, "ndim", 0) == 4 else 1 for image in images)


def can_stack(images: list[Any]) -> bool:
    """Whether these are equal images on one accelerator."""
    if len(images) < 2 or not all(isinstance(image, torch.Tensor) and image.ndim == 3 for image in images):
        return False
    kinds = {(image.shape, image.dtype, image.device) for image in images}
    return len(kinds) == 1 and images[0].device.type != "cpu"


def name_image(image: Any, index: int) -> str:
    """How messages call an image: by its file if it has one, else by its place."""
    if isinstance(image, dict):
        image = image.get("path")
    path = getattr(image, "filename", image)
    if isinstance(path, str | os.PathLike) and str(path):
        return str(path) if len(str(path)) <= 200 else f"image {index} ({str(path)[:50]}...)"
    return f"image {index}"


def collate_images(images: Iterator[torch.Tensor], length: int, settings: SimpleNamespace) -> dict[str, Any]:
    if settings.data_format == "channels_last":
        images = (image.movedim(-3, -1) for image in images)
    return {"pixel_values": stack(images, length, settings.return_tensors)}


def collate_patches(images: Iterator[torch.Tensor], length: int, settings: SimpleNamespace) -> dict[str, Any]:
    """Images of different sizes in one batch: see `HfViTImageProcessor.preprocess`."""
    patch_size, patches, grids = as_pair(settings.patch_size), [], []
    for image in images:
        if image.shape[-2] % patch_size[0] or image.shape[-1] % patch_size[1]:
            raise ValueError(f"patches of {patch_size} pixels do not divide an image of {tuple(image.shape[-2:])}")
        patches.append(patchify(image, patch_size))
        grids.append(torch.tensor([image.shape[-2] // patch_size[0], image.shape[-1] // patch_size[1]]))
    longest = max(map(len, patches), default=0)
    if longest > settings.max_num_patches:
        raise ValueError(f"an image has {longest} patches, more than max_num_patches, {settings.max_num_patches}")
    stacked, mask = pad_patches(patches, longest if settings.padding == "longest" else settings.max_num_patches)
    features = {"pixel_values": stacked, "pixel_attention_mask": mask, "spatial_shapes": grids}
    return {name: stack(iter(value), length, settings.return_tensors) for name, value in features.items()}


def stack(results: Iterator[torch.Tensor], length: int, return_tensors: str | None) -> Any:
    """Results of equal shape in one tensor ("pt") or array ("np"), or in a list (None).

    They are put into their places one by one, so that each can use the memory of the one before.
    """
    if return_tensors is None:
        return list(results)
    batch, number = torch.empty(0), 0
    for number, result in enumerate(results, start=1):
        if number == 1:
            batch = result[None] if length == 1 else result.new_empty(length, *result.shape)
        if result.shape != batch.shape[1:]:
            raise ValueError(
                f"images of shapes {tuple(batch.shape[1:])} and {tuple(result.shape)} are no batch: "
                "resize or crop them to one size, or leave out return_tensors for a list"
            )
        if length > 1:
            batch[number - 1] = result
    return batch[:number].cpu().numpy() if return_tensors == "np" else batch[:number]
