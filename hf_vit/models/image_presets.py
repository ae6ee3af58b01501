"""Settings of the image processor: presets, defaults, and settings that depend on each other."""

import reprlib
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch

from .image_resizing import AREA, BICUBIC, BILINEAR, KERNELS
from .utils import allowed, as_pair

# Upper limits. For comparison, an image of 8,000 x 6,000 pixels has 2**25.5 pixels.
MAX_OUTPUT_PIXELS = 2**26  # pixels per image, after the resize and after the crop
MAX_CHANNELS = 1_024
MAX_PATCHES = 2**20  # patches per image
MAX_OUTPUT_VALUES = 2**28  # values per image, including padding

# Resize of each preset. `crop_pct`, in presets that crop: crop size / shorter side of the resized image, with one value
# for crops below 384 pixels and one for crops of 384 pixels or more.
PRESETS: dict[str, dict[str, Any]] = {
    # vit_jax: tf.image.resize(image, size), then (x - 127.5) / 127.5
    "vit_jax": {"resample": BILINEAR, "antialias": False, "resize_output": "float"},
    # AugReg: resize_small(256)|central_crop(224), and resize_small(448)|central_crop(384)
    "augreg": {"resample": AREA, "antialias": False, "resize_output": "truncated", "crop_pct": (7 / 8, 6 / 7)},
    # big_vision's classifiers: resize_small(256)|central_crop(224)|value_range(-1, 1)
    "big_vision": {"resample": AREA, "antialias": False, "resize_output": "truncated", "crop_pct": (7 / 8, 7 / 8)},
    # big_vision's image-text towers: resize(224)|value_range(-1, 1)
    "lit": {"resample": BILINEAR, "antialias": False, "resize_output": "truncated"},
    # big_transfer: tf.image.resize(image, size), then (x - 127.5) / 127.5, at 480 or 128 pixels (BiT-HyperRule)
    "bit": {"resample": BILINEAR, "antialias": False, "resize_output": "float"},
    # timm's entries for the released checkpoints
    "timm": {"resample": BICUBIC, "antialias": True, "resize_output": "rounded", "crop_pct": (0.9, 1.0)},
    # preprocessor_config.json of google/vit-* on the Hub
    "transformers": {"resample": BILINEAR, "antialias": True, "resize_output": "rounded"},
    # transformers' Siglip2ImageProcessor: aspect ratio kept, images as patches
    "native": {"resample": BILINEAR, "antialias": True, "resize_output": "rounded"},
}
# Settings that are the same in every preset: pixel values are in [-1, 1].
_COMMON = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "num_channels": 3,
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


def default_settings() -> dict[str, Any]:
    """Return the default settings: the preset "vit_jax" at 224 pixels."""
    return deepcopy({"preset": "vit_jax", **PRESETS["vit_jax"], **_COMMON, **_DEFAULTS})


def override_settings(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with changes applied; a change to None is ignored.

    A new preset changes all settings that it determines, and keeps the image size. With a preset that crops, a `size`
    with height and width is the crop size, and the resize follows from it, unless `crop_size` is given.

    Raises:
        ValueError: a value is invalid.
    """
    changes = {name: deepcopy(value) for name, value in changes.items() if value is not None}
    if not changes:
        return settings
    changes |= {name: _complete_size(name, changes[name]) for name in ("size", "crop_size") if name in changes}
    if changes.get("do_pad") or changes.get("pad_size"):
        raise ValueError("do_pad and pad_size are not supported; omit them")
    crop_pct = changes.pop("crop_pct", None)
    if crop_pct is not None and not 0.01 <= crop_pct <= 100:
        raise ValueError(f"crop_pct is {crop_pct}; it must be at least 0.01 and at most 100")

    preset = changes.get("preset", settings["preset"])
    resizing = dict(PRESETS[preset])
    ratios = resizing.pop("crop_pct", None)  # None if the preset does not crop
    image_size, sizes_follow = _output_size(settings), "preset" in changes or crop_pct is not None
    crops = ratios is not None and changes.get("do_center_crop", True)
    if crops and "height" in changes.get("size", {}) and "crop_size" not in changes:
        image_size, sizes_follow = changes.pop("size"), True
    if "preset" in changes:
        settings = {**settings, **deepcopy(_COMMON), **resizing}
    if sizes_follow and ratios is None:
        settings = {**settings, "size": image_size, "do_center_crop": False}
    elif sizes_follow and ratios is not None:
        side = max(image_size.values())
        size = {"shortest_edge": int(side / (crop_pct or ratios[side >= 384]) + 1e-6)}
        settings = {**settings, "size": size, "do_center_crop": True, "crop_size": image_size}
    settings = {**settings, **changes, **_match_channels(settings, changes)}
    if settings["do_center_crop"] and settings["crop_size"] is None:
        settings["crop_size"] = _output_size({**settings, "do_center_crop": False})
    patches_follow = settings["max_num_patches"] is None or not changes.keys().isdisjoint({"size", "patch_size"})
    if preset == "native" and "max_num_patches" not in changes and patches_follow:
        size, (patch_height, patch_width) = _output_size(settings), as_pair(settings["patch_size"])
        settings["max_num_patches"] = max(1, size["height"] // patch_height) * max(1, size["width"] // patch_width)
    _check_settings(settings)
    return settings


def _output_size(settings: dict[str, Any]) -> dict[str, int]:
    """Return {"height", "width"} of the processed image."""
    size = settings["crop_size"] if settings["do_center_crop"] else settings["size"]
    return size if "height" in size else {"height": size["shortest_edge"], "width": size["shortest_edge"]}


def _match_channels(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the mean and std for a new number of channels, or the number of channels for a new mean."""
    if "num_channels" in changes:
        count = min(changes["num_channels"], MAX_CHANNELS + 1)  # `_check_settings` raises for more
        values = {name: changes.get(name, settings[name]) for name in ("image_mean", "image_std")}
        entries = {name: value if isinstance(value, list | tuple) else [value] for name, value in values.items()}
        return {name: value[:1] * count for name, value in entries.items() if len(set(value)) == 1}
    if "image_mean" in changes:
        mean = changes["image_mean"]
        return {"num_channels": len(mean) if isinstance(mean, list | tuple) else None}
    return {}


def _complete_size(name: str, size: Any) -> dict[str, int]:
    """Convert a size such as 224, (224, 320) or a dict to {"height", "width"} or {"shortest_edge"}."""
    sides: Any = size
    if isinstance(size, int) or (isinstance(size, list | tuple) and len(size) == 2):
        sides = zip(("height", "width"), as_pair(size), strict=True)
    with suppress(TypeError, ValueError):
        sides = dict[str, Any](sides)
        height, width = (sides.get(side, sides.get("shortest_edge")) for side in ("height", "width"))
        has_names = set(sides) == {"height", "width"} or (name == "size" and set(sides) == {"shortest_edge"})
        is_allowed = 0 < height * width <= MAX_OUTPUT_PIXELS or allowed("large")
        if has_names and type(height) is type(width) is int and min(height, width) > 0 and is_allowed:
            return sides
    edge = ' or {"shortest_edge"}' if name == "size" else ""
    raise ValueError(
        f'{name} is {reprlib.repr(size)}; expected pixels as an int, (height, width), {{"height", "width"}}{edge}, at '
        f"most {MAX_OUTPUT_PIXELS:,} in area (HF_VIT_ALLOW=large lifts this limit)"
    )


def _check_settings(settings: dict[str, Any]) -> None:
    """Raise ValueError if settings are out of range or contradict each other."""
    scale_and_offset(settings["rescale_factor"], settings["image_mean"], settings["image_std"], "cpu")
    channels, patches = settings["num_channels"], settings["max_num_patches"]
    for name in ("image_mean", "image_std"):
        values = settings[name]
        if isinstance(values, list | tuple) and channels is not None and len(values) != channels:
            raise ValueError(f"{name} has {len(values)} entries for {channels} channels: {reprlib.repr(values)}")
    background, patch_size = settings["background"], settings["patch_size"]
    if len(background) != 3 or not all(0 <= level <= 255 for level in background):
        raise ValueError(f"background is {reprlib.repr(background)}; it must be red, green and blue from 0 to 255")
    if not isinstance(patch_size, int) and len(patch_size) != 2:
        raise ValueError(f"patch_size is {reprlib.repr(patch_size)}; it must be an int or (height, width)")
    (patch_height, patch_width), size = as_pair(patch_size), _output_size(settings)
    values = max(size["height"] * size["width"], patch_height * patch_width * (patches or 1))
    for name, value, highest in (
        ("patch height", patch_height, MAX_OUTPUT_PIXELS),
        ("patch width", patch_width, MAX_OUTPUT_PIXELS),
        ("max_num_patches", patches, MAX_PATCHES),
        ("num_channels", channels, MAX_CHANNELS),
        ("the number of values of an image", values * (channels or 1), MAX_OUTPUT_VALUES),
    ):
        if value is not None and not 1 <= value <= highest:
            raise ValueError(f"{name} is {reprlib.repr(value)}; it must be at least 1 and at most {highest:,}")
    resample, antialias, output = settings["resample"], settings["antialias"], settings["resize_output"]
    if output == "rounded":
        exists = antialias and resample != AREA
    else:
        exists = resample == AREA or resample in (KERNELS if antialias else [BILINEAR])
    if not exists:
        raise ValueError(
            f"cannot resize with resample={resample}, antialias={antialias}, resize_output={output!r} (expected "
            f'Pillow\'s "rounded" with antialias and resample 0 to 5, or TensorFlow\'s "float" or "truncated" with '
            f'resample "{AREA}", {BILINEAR} with or without antialias, or {BICUBIC} with antialias)'
        )


def scale_and_offset(
    factor: float,
    mean: float | list[float] | tuple[float, ...],
    std: float | list[float] | tuple[float, ...],
    device: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and offset, such that level * scale + offset equals (level * factor - mean) / std.

    Returns:
        Two float32 tensors (channels, 1, 1).

    Raises:
        ValueError: pixel values would exceed the range of float32.
    """
    mean, std = (tuple(value) if isinstance(value, list | tuple) else (value,) for value in (mean, std))
    return _scale_and_offset(factor, mean, std, device)


@lru_cache(maxsize=64)
def _scale_and_offset(
    factor: float, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        means, stds = (torch.tensor(value, dtype=torch.float64)[:, None, None] for value in (mean, std))
        scale, offset = (factor / stds).float(), (-means / stds).float()
    except (OverflowError, RuntimeError):  # an int above the range of float
        scale = offset = torch.tensor(torch.inf)
    if not (255 * scale + offset).isfinite().all():
        numbers = (
            f"rescale_factor {reprlib.repr(factor)}, image_mean {reprlib.repr(mean)}, image_std {reprlib.repr(std)}"
        )
        raise ValueError(f"{numbers} lead to pixel values outside the range of float32")
    return scale.to(device), offset.to(device)
