"""Image processor with the preprocessing of the original evaluations, as presets."""

import json
import math
import os
import reprlib
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub.dataclasses import validate_typed_dict
from torch.nn.functional import pad
from transformers.image_processing_base import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ImagesKwargs
from transformers.utils import logging

from .image_decoding import ImageReadingError, name_image
from .image_reading import list_images, read_image
from .image_resizing import Filter, clip_window, crop_to, fit_grid, pad_to, resize
from .resize_weights import AREA, BICUBIC, BILINEAR, KERNELS, center_window, crop_rounding, shortest_edge_size
from .sizes import as_pair, check_arguments, check_size, did_you_mean, value_errors

# Upper limits. For comparison, an image of 8,000 x 6,000 pixels has 2**25.5 pixels.
MAX_OUTPUT_PIXELS = 2**26  # pixels per image, after the resize and after the crop
MAX_CHANNELS = 1_024
MAX_PATCHES = 2**20  # patches per image
MAX_OUTPUT_VALUES = 2**28  # values per image, including padding


class Preset(NamedTuple):
    """Steps of a named preprocessing, in the order in which an image passes them.

    Then, in every preset, levels from 0 to 255 are divided by 255 and normalized with mean and standard deviation 0.5,
    so that pixel values are in [-1, 1].

    Args:
        jpeg_dct: decoder of JPEG files. TensorFlow's has the fast cosine transform, Pillow's the accurate one.
        resample, antialias, resize_output: the resize, see `HfViTImageProcessor`. Without a crop, images are stretched
            to the image size; with "native", their aspect ratio is kept.
        crop_pct: of presets with a center crop: crop size / shorter side of the resized image, for crops below 384
            pixels and from 384 on.
    """

    jpeg_dct: str
    resample: Any
    antialias: bool
    resize_output: str
    crop_pct: tuple[float, float] | None = None

    def settings(self) -> dict[str, Any]:
        """Return the settings of an image processor that the preset determines, except the sizes."""
        return {
            "jpeg_dct": self.jpeg_dct,
            "do_resize": True,
            "resample": self.resample,
            "antialias": self.antialias,
            "resize_output": self.resize_output,
            "do_flip_channel_order": False,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "num_channels": 3,
        }

    def sizes(self, image_size: dict[str, int], crop_pct: float | None = None) -> dict[str, Any]:
        """Return the settings of the resize and the crop with which the preset returns images of `image_size`."""
        if self.crop_pct is None:
            return {"size": image_size, "do_center_crop": False}
        side = max(image_size.values())
        shortest_edge = int(side / (crop_pct or self.crop_pct[side >= 384]) + 1e-6)
        return {"size": {"shortest_edge": shortest_edge}, "do_center_crop": True, "crop_size": image_size}


PRESETS = {
    # vit_jax: tf.image.resize(image, size), then (x - 127.5) / 127.5
    "vit_jax": Preset("fast", BILINEAR, antialias=False, resize_output="float"),
    # AugReg: resize_small(256)|central_crop(224), and resize_small(448)|central_crop(384)
    "augreg": Preset("fast", AREA, antialias=False, resize_output="truncated", crop_pct=(7 / 8, 6 / 7)),
    # big_vision's classifiers: resize_small(256)|central_crop(224)|value_range(-1, 1)
    "big_vision": Preset("fast", AREA, antialias=False, resize_output="truncated", crop_pct=(7 / 8, 7 / 8)),
    # big_vision's image-text towers: resize(224)|value_range(-1, 1)
    "lit": Preset("fast", BILINEAR, antialias=False, resize_output="truncated"),
    # big_transfer: tf.image.resize(image, size), then (x - 127.5) / 127.5, at 480 or 128 pixels (BiT-HyperRule)
    "bit": Preset("fast", BILINEAR, antialias=False, resize_output="float"),
    # timm's entries for the released checkpoints
    "timm": Preset("accurate", BICUBIC, antialias=True, resize_output="rounded", crop_pct=(0.9, 1.0)),
    # preprocessor_config.json of google/vit-* on the Hub
    "transformers": Preset("accurate", BILINEAR, antialias=True, resize_output="rounded"),
    # transformers' Siglip2ImageProcessor: aspect ratio kept, images as patches. Files of NaFlex are converted with
    # this preset and "fast".
    "native": Preset("accurate", BILINEAR, antialias=True, resize_output="rounded"),
}
# Settings that no preset determines.
_DEFAULTS = {
    "size": {"height": 224, "width": 224},
    "do_center_crop": False,
    "crop_size": None,
    "do_convert_rgb": True,
    "background": [255, 255, 255],
    "patch_size": 16,
    "max_num_patches": None,
    "padding": "max_num_patches",
    "reduced_decoding": False,
    "backend": "auto",
    "on_error": "raise",
}
logger = logging.get_logger(__name__)
# Keys of a preprocessor_config.json that are not settings, in addition to keys with a leading underscore.
_FILE_KEYS = ("image_processor_type", "feature_extractor_type", "processor_class", "auto_map")
# Files that training and `calibrate` write.
AFTER_CONVERSION = ("card_data.json", "recipe.yaml", "calibration.json")
# Arguments of `preprocess` that are not settings of the processor.
_CALL_KEYS = ("input_data_format", "data_format", "device", "return_tensors")


def stored_class(settings: Mapping[str, Any]) -> str | None:
    """Return the name of the class in a preprocessor_config.json; None if it names none."""
    name = settings.get("image_processor_type") or settings.get("feature_extractor_type")
    return None if name is None else str(name)


def default_settings() -> dict[str, Any]:
    """Return the default settings: the preset "vit_jax" at 224 pixels."""
    return deepcopy({"preset": "vit_jax", **PRESETS["vit_jax"].settings(), **_DEFAULTS})


def override_settings(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with changes applied; a change to None is ignored.

    A new preset changes all settings that it determines, and keeps the image size. With a preset that crops, a `size`
    with height and width is the crop size, and the resize follows from it, unless `crop_size` is given.

    Raises:
        ValueError: a value is invalid.
    """
    changes = _complete_changes(changes)
    if not changes:
        return settings
    crop_pct = changes.pop("crop_pct", None)
    preset = PRESETS[changes.get("preset", settings["preset"])]
    result = dict(settings)
    if "preset" in changes:
        result.update(preset.settings())
    crops = preset.crop_pct is not None and changes.get("do_center_crop", True)
    if crops and "height" in changes.get("size", {}) and "crop_size" not in changes:
        result.update(preset.sizes(changes.pop("size"), crop_pct))
    elif "preset" in changes or crop_pct is not None:
        result.update(preset.sizes(_image_size(settings), crop_pct))
    matched = _match_channels(result, changes)
    result.update(changes)
    result.update(matched)
    if result["do_center_crop"] and result["crop_size"] is None:
        result["crop_size"] = _image_size({**result, "do_center_crop": False})
    patches_follow = result["max_num_patches"] is None or "size" in changes or "patch_size" in changes
    if result["preset"] == "native" and "max_num_patches" not in changes and patches_follow:
        result["max_num_patches"] = _count_patches(result)
    _check_settings(result)
    return result


def _complete_changes(changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the changes without those to None, and with sizes as dictionaries.

    Raises:
        ValueError: a size or `crop_pct` is invalid, or the change is not supported.
    """
    complete = {name: deepcopy(value) for name, value in changes.items() if value is not None}
    if complete.get("do_pad") or complete.get("pad_size"):
        raise ValueError("do_pad and pad_size are not supported; omit them")
    for name in ("size", "crop_size"):
        if name in complete:
            complete[name] = _complete_size(name, complete[name])
    if not 0.01 <= complete.get("crop_pct", 1) <= 100:
        raise ValueError(f"crop_pct is {complete['crop_pct']}; it must be at least 0.01 and at most 100")
    return complete


def _count_patches(settings: dict[str, Any]) -> int:
    """Return the number of patches of an image of the processor's size."""
    size = _image_size(settings)
    height, width = as_pair(settings["patch_size"])
    return max(1, size["height"] // height) * max(1, size["width"] // width)


def _image_size(settings: dict[str, Any]) -> dict[str, int]:
    """Return {"height", "width"} of the processed image."""
    size = settings["crop_size"] if settings["do_center_crop"] else settings["size"]
    return size if "height" in size else {"height": size["shortest_edge"], "width": size["shortest_edge"]}


def _match_channels(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the mean and std for a new number of channels, or the number of channels for a new mean."""
    if "num_channels" in changes:
        count = min(changes["num_channels"], MAX_CHANNELS + 1)  # `_check_settings` raises for more
        matched = {}
        for name in ("image_mean", "image_std"):
            value = changes.get(name, settings[name])
            entries = value if isinstance(value, list | tuple) else [value]
            if len(set(entries)) == 1:
                matched[name] = entries[:1] * count
        return matched
    if "image_mean" in changes:
        mean = changes["image_mean"]
        return {"num_channels": len(mean) if isinstance(mean, list | tuple) else None}
    return {}


def _complete_size(name: str, size: Any) -> dict[str, int]:
    """Convert a size such as 224, (224, 320) or a dict to {"height", "width"} or {"shortest_edge"}."""
    if not isinstance(size, dict):
        check_size(name, size)
        return dict(zip(("height", "width"), as_pair(size), strict=True))
    if set(size) == {"height", "width"}:
        check_size(name, (size["height"], size["width"]))
    elif set(size) == {"shortest_edge"} and name == "size":
        check_size(name, size["shortest_edge"])
    else:
        raise ValueError(f"{name} has {', '.join(size)} (expected height and width; or for size, shortest_edge)")
    return size


def _check_settings(settings: dict[str, Any]) -> None:
    """Raise ValueError if settings are out of range or contradict each other."""
    Normalize(settings["rescale_factor"], settings["image_mean"], settings["image_std"]).scale_and_offset()
    check_size("patch_size", settings["patch_size"])
    if len(settings["background"]) != 3 or not all(0 <= level <= 255 for level in settings["background"]):
        raise ValueError(f"background is {settings['background']}; it must be red, green and blue from 0 to 255")
    channels = settings["num_channels"]
    patches = settings["max_num_patches"]
    size = _image_size(settings)
    if settings["do_flip_channel_order"] and (channels != 3 or settings["preset"] == "native"):
        raise ValueError("do_flip_channel_order needs three channels, and another preset than native")
    values = max(size["height"] * size["width"], math.prod(as_pair(settings["patch_size"])) * (patches or 1))
    for name, value, highest in (
        ("max_num_patches", patches, MAX_PATCHES),
        ("num_channels", channels, MAX_CHANNELS),
        ("the number of values of an image", values * (channels or 1), MAX_OUTPUT_VALUES),
    ):
        if value is not None and not 1 <= value <= highest:
            raise ValueError(f"{name} is {reprlib.repr(value)}; it must be at least 1 and at most {highest:,}")
    _check_resize(settings["resample"], settings["antialias"], settings["resize_output"])


def _check_resize(resample: Any, antialias: bool, output: str) -> None:
    """Raise ValueError if a resize with these settings does not exist."""
    if output == "rounded":
        exists = antialias and resample != AREA
    elif antialias:
        exists = resample == AREA or resample in KERNELS
    else:
        exists = resample in (AREA, BILINEAR)
    if not exists:
        raise ValueError(
            f"cannot resize with resample={resample}, antialias={antialias}, resize_output={output!r} (expected "
            f'"rounded" with antialias and resample 0 to 5, or "float" or "truncated" with resample "{AREA}", '
            f"{BILINEAR}, or {BICUBIC} with antialias)"
        )


_SETTINGS = tuple(default_settings())


class HfViTImageProcessorKwargs(ImagesKwargs, total=False):
    """Keyword arguments of `HfViTImageProcessor`, which describes them; they extend `ImagesKwargs`."""

    preset: Literal["vit_jax", "augreg", "big_vision", "lit", "bit", "timm", "transformers", "native"] | None
    jpeg_dct: Literal["fast", "accurate"] | None
    crop_pct: float | None
    resample: Literal[0, 1, 2, 3, 4, 5, "area"] | None
    antialias: bool | None
    resize_output: Literal["float", "truncated", "rounded"] | None
    image_mean: float | int | list[float | int] | tuple[float | int, ...] | None
    image_std: float | int | list[float | int] | tuple[float | int, ...] | None
    num_channels: int | None
    do_flip_channel_order: bool | None
    background: list[int] | tuple[int, ...] | None
    patch_size: int | list[int] | tuple[int, ...] | None
    max_num_patches: int | None
    padding: Literal["max_num_patches", "longest"] | None
    reduced_decoding: bool | None
    backend: Literal["auto", "pillow", "torch"] | None
    on_error: Literal["raise", "skip"] | None
    input_data_format: Literal["channels_first", "channels_last"] | None
    data_format: Literal["channels_first", "channels_last"] | None
    return_tensors: Literal["pt", "np"] | None


class HfViTImageProcessor(BaseImageProcessor):
    r"""Image processor with the preprocessing that a checkpoint was evaluated with.

    An image is a path, bytes, PIL image, array or tensor of any mode and type, see `image_reading`. Calls accept
    one image, a list or a batch. Every argument can also be passed to a call, for that call only.

    In the following, levels are pixel intensities from 0 to 255, before they are normalized.

    Args:
        preset: named preprocessing, which sets the JPEG decoder, the resize, the crop, the normalization and
            `num_channels`, but not the image size:

            | preset | resize | levels |
            | --- | --- | --- |
            | "vit_jax" | bilinear without antialiasing, stretched to `size` | not rounded |
            | "augreg" | area, shorter side 256 (448), then center crop 224 (384) | rounded down |
            | "big_vision" | area, shorter side 8/7 of the center crop | rounded down |
            | "lit" | bilinear without antialiasing, stretched to `size` | rounded down |
            | "bit" | bilinear without antialiasing, stretched to `size` | not rounded |
            | "timm" | Pillow's bicubic, shorter side 10/9 of the center crop (equal from 384 pixels on) | rounded |
            | "transformers" | Pillow's bilinear, stretched to `size` | rounded |
            | "native" | Pillow's bilinear, aspect ratio kept, cut into patches | rounded |

        jpeg_dct: cosine transform of JPEG files: "fast" (as TensorFlow's decoder; needs simplejpeg) or "accurate" (as
            Pillow and PyTorch). It is "fast" in the presets from "vit_jax" to "bit". It applies to files, bytes, and
            PIL images that were opened from a file and not decoded yet.
        size: size of the processed image in pixels, an int or {"height", "width"}; or {"shortest_edge"}, the shorter
            side of the resized image before the crop.
        crop_size: size of the center crop, by default `size`; smaller images get a black border.
        crop_pct: crop size / shorter side of the resized image, instead of the preset's value. It determines `size` and
            is not stored.
        do_resize, do_center_crop, do_rescale, do_normalize, do_convert_rgb: whether to apply each step.
            Without `do_rescale`, floating-point images keep their values. Without `do_convert_rgb`, images keep their
            channels.
        resample: 2 (bilinear), 3 (bicubic) or another number of `PIL.Image.Resampling`, or "area" (TensorFlow's).
        antialias: widen the filter when the image shrinks.
        resize_output: levels after the resize: "float", "truncated" (to uint8, as in TensorFlow) or "rounded" (to
            uint8, as in Pillow).
        rescale_factor, image_mean, image_std: pixel values are (level * rescale_factor - image_mean) / image_std.
        num_channels: number of channels of the model. Gray images are repeated to `num_channels`; color images are
            converted to gray for 1 channel.
        do_flip_channel_order: return blue, green and red. Mean and standard deviation are in the same order.
        background: (red, green, blue), the background of transparent images.
        patch_size: for "native", patch size in pixels, an int or (height, width).
        max_num_patches: for "native", maximum number of patches per image; by default that of an image of `size`.
        padding: for "native", number of patches to pad to: "max_num_patches", or "longest" (in the batch).
        reduced_decoding: decode a JPEG at 1/2, 1/4 or 1/8 of its size, if that is not smaller than the resized image.
            This is faster for large photographs, but changes the levels: for 4000 x 3000 pixels by 1 on average with
            "transformers", by 2 with "timm", and by 17 with "vit_jax", which does not antialias.
        backend: implementation of Pillow's filters: "pillow" (CPU), "torch" (bilinear and bicubic, on the tensor's
            device), or "auto" (the faster one). The results are bit-identical.
        on_error: "raise", or "skip" images that cannot be read; the result's attribute `skipped` lists their indices.

    Raises:
        ValueError: an argument is unknown or invalid.
    """

    valid_kwargs = HfViTImageProcessorKwargs
    preset: str
    jpeg_dct: str
    size: Any
    crop_size: Any
    image_mean: Any
    image_std: Any
    do_resize: bool
    do_center_crop: bool

    def __init__(self, preset: str = "vit_jax", **kwargs: Any):
        about_file: dict[str, Any] = {
            name: kwargs.pop(name) for name in [*kwargs] if name in _FILE_KEYS or name[0] == "_"
        }
        super().__init__(**about_file)
        check_arguments(type(self).__name__, kwargs, self.valid_kwargs.__annotations__)
        vars(self).update(default_settings())
        self.update(preset=preset, **kwargs)

    def update(self, **changes: Any) -> None:
        """Change settings permanently; settings that depend on them change too, as in a call."""
        self._check_types(changes)
        for name, value in override_settings(self.settings(), changes).items():
            if name not in _CALL_KEYS:
                setattr(self, name, value)

    def _check_types(self, changes: dict[str, Any]) -> None:
        """Raise ValueError if a setting has the wrong type."""
        with value_errors():
            validate_typed_dict(self.valid_kwargs, changes)  # pyright: ignore[reportArgumentType]

    def settings(self) -> dict[str, Any]:
        """Return all settings, name -> value."""
        return {name: getattr(self, name) for name in _SETTINGS}

    def resolve_settings(self, **kwargs: Any) -> SimpleNamespace:
        """Return the settings for one call, with the call's own arguments, see `_CALL_KEYS`."""
        self._check_types(kwargs)
        call = {name: kwargs.pop(name, None) for name in _CALL_KEYS}
        settings = SimpleNamespace(**override_settings(self.settings(), kwargs), **call)
        if settings.backend == "pillow" and torch.device(settings.device or "cpu").type != "cpu":
            raise ValueError(f'cannot compute on {settings.device} with backend="pillow"; use backend="torch"')
        return settings

    @classmethod
    def get_image_processor_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Read preprocessor_config.json, as in transformers; a file without `jpeg_dct` is completed."""
        stored, unused = super().get_image_processor_dict(pretrained_model_name_or_path, **kwargs)
        path = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
        return add_jpeg_dct(stored, record_of_original(path.parent if path.is_file() else path)), unused

    @classmethod
    def from_dict(cls, image_processor_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a processor from settings, as in transformers; `kwargs` override them, as in `update`.

        Unknown fields of a preprocessor_config.json are kept, with a warning. Arguments for the model, which Auto
        classes pass on, are ignored.

        Raises:
            ValueError: the settings are of another class, a field has the wrong type, or an argument looks like a
                misspelled setting.
        """
        stored_name = stored_class(image_processor_dict)
        if stored_name not in (None, cls.__name__, HfViTImageProcessor.__name__):
            raise ValueError(f"the image processor is a {stored_name} (expected {cls.__name__}); use hf_vit.load")
        known = cls.valid_kwargs.__annotations__
        wants_unused = kwargs.pop("return_unused_kwargs", False)
        changes = {name: kwargs.pop(name) for name in [*kwargs] if name in known}
        stored = {name: value for name, value in image_processor_dict.items() if name in (*known, *_FILE_KEYS)}
        unknown = {name: value for name, value in image_processor_dict.items() if name not in stored}
        if unknown:
            logger.warning_once(f"preprocessor_config.json has fields without effect: {reprlib.repr([*unknown])}")
        processor = cls(**stored)
        vars(processor).update({name: value for name, value in unknown.items() if not hasattr(cls, name)})
        processor.update(**changes)
        if wants_unused:
            return processor, kwargs
        check_arguments(cls.__name__, (name for name in kwargs if did_you_mean(name, _SETTINGS)), _SETTINGS)
        return processor

    @property
    def model_input_names(self) -> list[str]:
        masks = ["pixel_attention_mask", "spatial_shapes"] if self.preset == "native" else []
        return ["pixel_values", *masks]

    @classmethod
    def for_model(cls, config: Any, **settings: Any) -> "HfViTImageProcessor":
        """Build a processor with a model's image size, number of channels and patch size.

        Args:
            config: `HfViTConfig`, `HfViTHybridConfig` or `HfBiTConfig`.
            settings: arguments of the constructor, such as `preset`; they take precedence.
        """
        own: dict[str, Any] = {"size": as_pair(config.image_size), "num_channels": config.num_channels}
        if hasattr(config, "patch_size"):
            own["patch_size"] = [size * config.stride for size in as_pair(config.patch_size)]
        return cls(**{**own, **settings})

    @torch.no_grad()
    def __call__(self, images: Any, *args: Any, **kwargs: Any) -> BatchFeature:
        """Preprocess images, which can be paths and bytes; see `preprocess`."""
        return super().__call__(images, *args, **kwargs)

    def preprocess(self, images: Any, **kwargs: Any) -> BatchFeature:
        """Preprocess one or more images.

        Args:
            images: an image; an array or tensor of images of one size; or a (nested) list of these.
            kwargs: settings for this call, and `input_data_format` and `data_format` ("channels_first" or
                "channels_last", for input arrays and for the result), `return_tensors` ("pt", "np", or None for a list)
                and `device` (for the "torch" backend).

        Returns:
            `pixel_values`: (batch, channels, height, width); with the preset "native",
                (batch, patches, patch height * patch width * channels).
            `pixel_attention_mask`: only with "native", (batch, patches), 1 for real patches and 0 for padding.
            `spatial_shapes`: only with "native", (batch, 2), rows and columns of patches of each image.
            The attribute `skipped` of the result lists the indices of skipped images.

        Raises:
            ImageReadingError: an image cannot be read; the message names the file or the index.
            ValueError: there are no images, or a setting is invalid.
        """
        settings = self.resolve_settings(**kwargs)
        images = list_images(images, settings.device)
        is_native = settings.preset == "native"
        stacks = settings.return_tensors is not None and not is_native
        results = _Results(len(images), stacks)
        errors: dict[int, str] = {}
        for index, image in enumerate(images):
            try:
                result = _process_image(image, settings, name_image(image, index))
            except ImageReadingError as error:
                if settings.on_error == "raise":
                    raise
                errors[index] = str(error)
                continue
            if settings.data_format == "channels_last" and not is_native:
                result = result.movedim(-3, -1)
            results.add(result)
        if not results.images:
            reasons = "; ".join(errors.values()) or "the list is empty"
            raise ImageReadingError(f"cannot read any of {len(images)} images: {reasons[:1000]}")
        if errors:
            logger.warning("skipped %d images: %s", len(errors), "; ".join(errors.values()))
        features: dict[str, Any] = {"pixel_values": results.tensor()}
        if is_native:
            features = _to_patches(results.images, settings)
        if settings.return_tensors == "np":
            features = {name: _to_numpy(values) for name, values in features.items()}
        batch = BatchFeature(features, tensor_type=settings.return_tensors)
        vars(batch)["skipped"] = list(errors)
        return batch


class _Results:
    """Pixel values of the images of a call.

    Images of one shape are copied into one tensor, one by one, so that each can reuse the memory of the last.
    """

    def __init__(self, count: int, stacks: bool):
        self.images: list[torch.Tensor] = []  # (channels, height, width) each
        self._count = count
        self._stacks = stacks
        self._stacked: torch.Tensor | None = None

    def add(self, result: torch.Tensor) -> None:
        """Add the pixel values of an image, or of a batch of images of one size."""
        if result.ndim == 4:
            self.images.extend(result)
            return
        index = len(self.images)
        if self._stacks and self._count > 1:
            if index == 0:
                self._stacked = result.new_empty(self._count, *result.shape)
            if self._stacked is not None and result.shape == self._stacked.shape[1:]:
                result = self._stacked[index].copy_(result)
        self.images.append(result)

    def tensor(self) -> torch.Tensor | list[torch.Tensor]:
        """Return the images as one tensor if they were copied into one, otherwise as a list."""
        images = self.images
        if self._stacks and len(images) == self._count == 1:
            return images[0][None]
        if self._stacked is None or any(image.shape != images[0].shape for image in images):
            return images
        return self._stacked[: len(images)]


def _to_numpy(values: Any) -> Any:
    """Convert a tensor, or each of a list, to NumPy."""
    if isinstance(values, torch.Tensor):
        return values.cpu().numpy()
    return [value.cpu().numpy() for value in values]


def add_jpeg_dct(stored: dict[str, Any], record: str | os.PathLike | None) -> dict[str, Any]:
    """Add `jpeg_dct` to settings that were stored before this setting existed, when Pillow decoded all JPEGs.

    A folder of `hf-vit convert` has the weights of the original code, and the preset knows how that decodes. Any other
    folder may have been trained, evaluated or calibrated with the accurate transform, and keeps it.

    Args:
        stored: content of preprocessor_config.json.
        record: path of conversion.json; None if the weights are not those of the original code.
    """
    if "jpeg_dct" in stored:
        return stored
    if record is None:
        return {**stored, "jpeg_dct": "accurate"}
    return {**stored, "jpeg_dct": original_jpeg_dct(stored.get("preset", "vit_jax"), record)}


def record_of_original(folder: Path) -> Path | None:
    """Return the conversion.json of a folder if its weights are still those of the original code."""
    record = folder / "conversion.json"
    is_changed = any((folder / file).exists() for file in AFTER_CONVERSION)
    return record if record.exists() and not is_changed else None


def original_jpeg_dct(preset: str, record: str | os.PathLike | None) -> str | None:
    """Return how the original code of converted weights decodes JPEGs; None for an unknown preset.

    Args:
        preset: of the image processor. "native" is that of two libraries: big_vision and transformers.
        record: path of conversion.json.
    """
    if preset == "native" and record is not None:
        with open(record, encoding="utf-8") as file:
            dialect = json.load(file).get("dialect", {})
        return "fast" if dialect.get("names") == "big_vision" else "accurate"
    return PRESETS[preset].jpeg_dct if preset in PRESETS else None


def _process_image(image: Any, settings: SimpleNamespace, name: str) -> torch.Tensor:
    """Compute the pixel values of one image, or of a batch of images of one size."""
    decode, *steps = list_steps(settings)
    levels = decode(image, name=name)
    device = "cpu" if settings.backend == "pillow" else settings.device
    levels = levels.to(device=device)
    try:
        for step in steps:
            levels = step(levels)
    except ImageReadingError as error:
        raise ImageReadingError(f"{name}: {error}") from None
    return levels


# Steps of an image processor. `levels` are (..., channels, height, width), uint8 or float32 from 0 to 255.


def list_steps(settings: SimpleNamespace) -> list[Any]:
    """Return the steps of an image processor, in the order in which an image passes them.

    The first is a function of an image and its name, the others of levels.

    Args:
        settings: as returned by `HfViTImageProcessor.resolve_settings`.
    """
    crop = resizing = None
    if settings.do_center_crop:
        crop = CenterCrop(settings.crop_size, crop_rounding(settings.preset, settings.resize_output))
    if settings.do_resize:
        grid = None
        if settings.preset == "native":
            grid = as_pair(settings.patch_size), settings.max_num_patches
        filter_settings = settings.resample, settings.antialias, settings.resize_output, settings.backend
        resizing = Resize(settings.size, grid, *filter_settings, keep_float=not settings.do_rescale, crop=crop)
    num_channels = settings.num_channels if settings.do_convert_rgb else None
    reduce_to = resizing.new_size if resizing and settings.reduced_decoding else None
    decode = partial(
        read_image,
        jpeg_dct=settings.jpeg_dct,
        num_channels=num_channels,
        reduce_to=reduce_to,
        background=settings.background,
        input_data_format=settings.input_data_format,
        keep_float=not settings.do_rescale,
    )
    flip = flip_channels if settings.do_flip_channel_order else None
    steps = [decode, resizing or crop, flip, Normalize.of(settings)]
    return [step for step in steps if step is not None]


class CenterCrop(NamedTuple):
    """Cut out the center; smaller images get a black border."""

    size: dict[str, int]
    rounding: str  # see `center_window`

    def __call__(self, levels: torch.Tensor) -> torch.Tensor:
        size = levels.shape[-2], levels.shape[-1]
        window = center_window(size, *self)
        return pad_to(crop_to(levels, clip_window(window, size)), window, size)


class Resize(NamedTuple):
    """Resize, and compute only the pixels inside the crop that follows."""

    size: dict[str, int]
    grid: tuple[tuple[int, int], int] | None  # patch size and number of patches, instead of `size`
    resample: Any
    antialias: bool
    resize_output: str
    backend: str
    keep_float: bool  # do not round floating-point images, which are not levels from 0 to 255
    crop: CenterCrop | None

    def new_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) of the resized image."""
        if self.grid is not None:
            (patch_height, patch_width), _ = self.grid
            rows, columns = fit_grid(height, width, *self.grid)
            return rows * patch_height, columns * patch_width
        if "height" in self.size:
            return self.size["height"], self.size["width"]
        truncate = self.resize_output == "rounded"
        return shortest_edge_size(height, width, self.size["shortest_edge"], truncate)

    def __call__(self, levels: torch.Tensor) -> torch.Tensor:
        channels, height, width = levels.shape[-3:]
        size = self.new_size(height, width)
        window = range(size[0]), range(size[1])
        if self.crop is not None:
            window = center_window(size, *self.crop)
        inside = clip_window(window, size)
        pixels = len(inside[0]) * len(inside[1])
        if channels > 4:
            pixels *= channels
        if pixels > MAX_OUTPUT_PIXELS:
            found = f"{size[0]} x {size[1]} pixels of {channels:,} channels, {pixels:,} values,"
            raise ImageReadingError(f"cannot resize an image to {found}; at most {MAX_OUTPUT_PIXELS:,} are computed")
        many_taps = height * width > 4 * size[0] * size[1]
        faster_in_pillow = levels.device.type == "cpu" and (many_taps or self.resample not in KERNELS)
        use_pillow = self.backend == "pillow" or (self.backend == "auto" and faster_in_pillow)
        output = "float" if levels.is_floating_point() and self.keep_float else self.resize_output
        levels = resize(levels, size, inside, Filter(self.resample, self.antialias, output, use_pillow))
        return pad_to(levels, window, size)


def flip_channels(levels: torch.Tensor) -> torch.Tensor:
    """Reverse the order of the channels."""
    return levels.flip(-3)


class Normalize(NamedTuple):
    """Compute pixel values (level * rescale_factor - mean) / std, with one multiplication and one addition: float32."""

    rescale_factor: float
    mean: Any  # a number, or one for each channel
    std: Any

    @classmethod
    def of(cls, settings: Any) -> "Normalize":
        """Return the step of an image processor, or of its settings."""
        factor = settings.rescale_factor if settings.do_rescale else 1
        mean, std = (settings.image_mean, settings.image_std) if settings.do_normalize else (0, 1)
        return cls(factor, mean, std)

    def scale_and_offset(self, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and offset, such that pixel values are level * scale + offset.

        Returns:
            Two float32 tensors (channels, 1, 1).

        Raises:
            ValueError: mean and std differ in length, or pixel values would exceed the range of float32.
        """
        return _scale_and_offset(self.rescale_factor, _as_tuple(self.mean), _as_tuple(self.std), device)

    def __call__(self, levels: torch.Tensor) -> torch.Tensor:
        scale, offset = self.scale_and_offset(levels.device)
        if len(scale) not in (1, levels.shape[-3]):
            raise ImageReadingError(f"it has {levels.shape[-3]} channels, but image_mean has {len(scale)} entries")
        return torch.empty(levels.shape, device=levels.device).copy_(levels).mul_(scale).add_(offset)


def _as_tuple(value: Any) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


@lru_cache(maxsize=64)
def _scale_and_offset(
    factor: float, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        means = torch.tensor(mean, dtype=torch.float64)[:, None, None]
        stds = torch.tensor(std, dtype=torch.float64)[:, None, None]
        scale = (factor / stds).float()
        offset = (-means / stds).float()
    except (OverflowError, RuntimeError):  # an int above the range of float; different lengths
        scale = offset = torch.tensor(torch.inf)
    if not (255 * scale + offset).isfinite().all():
        numbers = f"rescale_factor {factor!r}, image_mean {mean}, image_std {std}"[:500]
        raise ValueError(f"{numbers}: the pixel values must be finite, and image_mean and image_std equally long")
    return scale.to(device), offset.to(device)


# Images as patches, with the names and the order of the values in a patch of transformers' `Siglip2ImageProcessor`.


def _to_patches(images: list[torch.Tensor], settings: SimpleNamespace) -> dict[str, list[torch.Tensor]]:
    """Cut images of different sizes into patches; for the result, see `HfViTImageProcessor.preprocess`."""
    height, width = as_pair(settings.patch_size)
    grids = []
    for image in images:
        rows = image.shape[-2] // height
        columns = image.shape[-1] // width
        if image.shape[-2:] != (rows * height, columns * width) or rows * columns > settings.max_num_patches:
            raise ValueError(
                f"an image of {image.shape[-2]} x {image.shape[-1]} pixels cannot be cut into at most "
                f"{settings.max_num_patches} patches of {height} x {width}; set do_resize=True"
            )
        grids.append(torch.tensor([rows, columns]))
    patches = [patchify(image, (height, width)) for image in images]
    length = max(map(len, patches)) if settings.padding == "longest" else settings.max_num_patches
    return {
        "pixel_values": [pad(image, (0, 0, 0, length - len(image))) for image in patches],
        "pixel_attention_mask": [(torch.arange(length, device=one.device) < len(one)).int() for one in patches],
        "spatial_shapes": grids,
    }


def patchify(images: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """(..., channels, height, width) -> (..., rows * columns, patch height * patch width * channels)"""
    patches = images.unflatten(-2, (-1, patch_size[0])).unflatten(-1, (-1, patch_size[1]))
    patches = patches.movedim(-5, -1).movedim(-3, -4)  # (..., rows, columns, patch height, patch width, channels)
    return patches.flatten(-3).flatten(-3, -2)
