"""Image processor of the Vision Transformer: any image in, the pixels its checkpoint was evaluated with out."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.dataclasses import validate_typed_dict
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ImagesKwargs

from .image_reading import read_image
from .image_resizing import resize_bilinear

BILINEAR = 2  # PIL.Image.Resampling

# What each preset determines, besides the sizes.
COMMON = {
    "do_convert_rgb": True,
    "background": [255, 255, 255],
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PRESETS = {
    # vit_jax's evaluation: tf.image.resize(image, size), then (x - 127.5) / 127.5
    "vit_jax": {"resample": BILINEAR, "antialias": False},
}
# Keys of a preprocessor_config.json that are not ours to judge.
KNOWN_EXTRAS = ("image_processor_type", "feature_extractor_type", "processor_class", "auto_map", "preset")


class HfViTImageProcessorKwargs(ImagesKwargs, total=False):
    r"""
    preset (`str`): name of a way of preprocessing, one of `PRESETS`.
    background (`list[int]`): colour that shows through where an image is transparent.
    antialias (`bool`): whether a filter widens when an image shrinks.
    """

    preset: str | None
    background: list[int] | tuple[int, ...] | None
    antialias: bool | None


class HfViTImageProcessor(BaseImageProcessor):
    r"""Turns images into `pixel_values` (batch, channels, height, width).

    Args:
        preset: which original to follow. "vit_jax": bilinear without antialias, squashed to `size`, in [-1, 1].
        size: an int or {"height", "width"}, in pixels.
        kwargs: any other number of the preset, by the name it has in preprocessor_config.json.
    """

    valid_kwargs = HfViTImageProcessorKwargs
    model_input_names = ["pixel_values"]  # noqa: RUF012 - as in the base class

    def __init__(self, preset: str = "vit_jax", **kwargs: Any):
        extras = {name: value for name, value in kwargs.items() if name in KNOWN_EXTRAS or name.startswith("_")}
        super().__init__(**extras)
        fields = {"preset": preset, **COMMON, **lookup_preset(preset), "size": {"height": 224, "width": 224}}
        changes = {name: value for name, value in kwargs.items() if name not in extras}
        if unknown := sorted(changes.keys() - self.valid_kwargs.__annotations__.keys()):
            raise ValueError(f"{type(self).__name__} does not know {', '.join(unknown)}")
        self._fields = tuple(fields)
        for name, value in change(fields, changes).items():
            setattr(self, name, value)

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """Preprocess one image or a batch; keyword arguments override the processor's fields for this call."""
        validate_typed_dict(self.valid_kwargs, kwargs)  # pyright: ignore[reportArgumentType]
        fields = change({name: getattr(self, name) for name in self._fields}, kwargs)
        processed = [
            process_image(image, fields, str(image) if isinstance(image, str | Path) else f"image {index}")
            for index, image in enumerate(list_images(images))
        ]
        batch = torch.cat(processed)
        return_tensors = fields.get("return_tensors")
        if return_tensors == "pt":
            return BatchFeature({"pixel_values": batch})
        return BatchFeature({"pixel_values": list(batch.numpy())}, tensor_type=return_tensors)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_dict().items() if name != "_fields"}


def lookup_preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return PRESETS[name]


def change(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Fields after an override: the size in full, None meaning "as it was"."""
    changes = {name: value for name, value in changes.items() if value is not None}
    if "preset" in changes:
        fields = {**fields, **COMMON, **lookup_preset(changes["preset"])}
    if isinstance(changes.get("size"), int):
        changes["size"] = {"height": changes["size"], "width": changes["size"]}
    return {**fields, **changes}


def list_images(images: Any) -> list[Any]:
    """One image, or nested lists of images -> a flat list."""
    if isinstance(images, list | tuple):
        return [image for item in images for image in list_images(item)]
    return [images]


def process_image(image: Any, fields: dict[str, Any], name: str) -> torch.Tensor:
    """From bytes to pixel values: (1 or batch, channels, height, width)."""
    levels = read_image(
        image,
        num_channels=len(fields["image_mean"]) if fields["do_convert_rgb"] else None,
        background=fields["background"],
        input_data_format=fields.get("input_data_format"),
        name=name,
    )
    if fields["do_resize"]:
        levels = resize_bilinear(levels, fields["size"]["height"], fields["size"]["width"])
    pixel_values = normalize(levels, fields)
    return pixel_values if pixel_values.ndim == 4 else pixel_values[None]


def normalize(levels: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    """(level * rescale_factor - mean) / std, as one multiplication and one addition."""
    scale = np.float32(fields["rescale_factor"] if fields["do_rescale"] else 1)
    if not fields["do_normalize"]:
        return levels * torch.tensor(scale)
    mean, std = (torch.tensor(fields[name])[:, None, None] for name in ("image_mean", "image_std"))
    return levels.mul(scale / std).contiguous().sub_(mean / std)
