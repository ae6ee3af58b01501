"""The evaluation in a config.json of timm (`pretrained_cfg`), read and written.

timm resizes with Pillow's filters, crops, divides by 255 and normalizes (timm/data/transforms_factory.py,
transforms_imagenet_eval).
"""

import math
from typing import Any

from PIL import Image

from ..files.image_sizes import output_size
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.resize_weights import AREA
from ..models.sizes import as_pair
from .image_processors import beyond_pillow, mean_and_std
from .source import Inferred, format_size
from .tables import IMAGENET, ConversionError

# timm's names of filters (timm/data/transforms.py, str_to_interp_mode) -> Pillow's numbers.
INTERPOLATIONS = {
    "nearest": int(Image.Resampling.NEAREST),
    "bilinear": int(Image.Resampling.BILINEAR),
    "bicubic": int(Image.Resampling.BICUBIC),
    "box": int(Image.Resampling.BOX),
    "hamming": int(Image.Resampling.HAMMING),
    "lanczos": int(Image.Resampling.LANCZOS),
}
_DEFAULTS = {  # timm/data/constants.py and config.py
    "interpolation": "bicubic",
    "crop_mode": "center",
    "crop_pct": 0.875,
    "input_size": (3, 224, 224),
    "mean": IMAGENET["image_mean"],
    "std": IMAGENET["image_std"],
}
_USUAL_CROP_PCTS = (0.875, 0.9, 0.95, 1.0)  # of most of timm's models


def preprocessing_of(pretrained_cfg: dict[str, Any]) -> Inferred:
    """Return the evaluation that a config.json of timm states, as arguments of `HfViTImageProcessor`.

    What it does not state has the default of timm's `resolve_data_config` (timm/data/config.py).

    Raises:
        ConversionError: it names a filter or a way to crop that the image processor lacks.
    """
    stated = {name: value for name, value in pretrained_cfg.items() if value}
    evaluation = {**_DEFAULTS, **stated}
    interpolation = evaluation["interpolation"]
    crop_mode = evaluation["crop_mode"]
    _, height, width = evaluation["input_size"]
    if interpolation not in INTERPOLATIONS:
        raise ConversionError(f"its interpolation is {interpolation!r} (expected {', '.join(INTERPOLATIONS)})")
    if crop_mode not in ("center", "squash"):
        raise ConversionError(f"its crop_mode is {crop_mode!r}, which pads images; hf_vit has center and squash")
    settings = {
        "preset": "timm",
        "resample": INTERPOLATIONS[interpolation],
        "image_mean": evaluation["mean"],
        "image_std": evaluation["std"],
    }
    reasons = []
    missing = [name for name in ("crop_pct", "mean", "std", "interpolation") if name not in stated]
    if missing:
        reasons.append(f"no config.json states {', '.join(missing)}; timm's default")
    if crop_mode == "squash":
        settings |= _squashed(height, width, evaluation["crop_pct"])
    else:
        settings["crop_pct"] = evaluation["crop_pct"]
        if height != width:
            reasons.append(f"timm resizes images until they cover {height} x {width}, hf_vit their shorter side")
    if reasons:
        return Inferred(settings, "; ".join(reasons), is_assumed=True)
    return Inferred(settings, "stated in config.json")


def _squashed(height: int, width: int, crop_pct: float) -> dict[str, Any]:
    """Return the sizes of timm's crop_mode "squash": both sides are resized, then the center is cropped."""
    resized = {"height": math.floor(height / crop_pct), "width": math.floor(width / crop_pct)}
    if crop_pct == 1:
        return {"size": resized, "do_center_crop": False}
    return {"size": resized, "do_center_crop": True, "crop_size": {"height": height, "width": width}}


def evaluation_of(processor: HfViTImageProcessor, config: Any) -> tuple[dict[str, Any], list[str]]:
    """Return an image processor's settings as entries of `pretrained_cfg`, and what timm computes in another way.

    Args:
        processor: the model's image processor.
        config: the model's configuration.

    Raises:
        ConversionError: the image processor returns images of another size than the model takes.
    """
    settings = processor.settings()
    differences = beyond_pillow(settings, rounds_half=True)
    image_size = as_pair(config.image_size)
    size = output_size(processor)
    if size is None:
        differences.append(f"images of different sizes (written: {format_size(image_size)})")
    elif size != image_size:
        raise ConversionError(
            f"the image processor returns images of {format_size(size)} pixels, and the model takes "
            f"{format_size(image_size)}"
        )
    interpolation = "bilinear"
    if settings["resample"] != AREA:
        interpolation = next(name for name, number in INTERPOLATIONS.items() if number == settings["resample"])
    if not settings["do_resize"]:
        differences.append("images that are not resized")
    crop_mode, crop_pct, is_exact = _crop_of(settings, image_size)
    if not is_exact:
        differences.append(f"this resize before the crop: {settings['size']}")
    evaluation = {
        "input_size": [config.num_channels, *image_size],
        "interpolation": interpolation,
        "crop_pct": crop_pct,
        "crop_mode": crop_mode,
        **mean_and_std(settings, config.num_channels),
    }
    return evaluation, differences


def _crop_of(settings: dict[str, Any], image_size: tuple[int, int]) -> tuple[str, float, bool]:
    """Return timm's crop_mode and crop_pct, and whether timm's resize has the sizes of the image processor's."""
    size = settings["size"]
    if not settings["do_center_crop"] or settings["preset"] == "native":
        return "squash", 1.0, "height" in size
    if "height" not in size:
        is_square = image_size[0] == image_size[1]
        return "center", _crop_pct_of(max(image_size), size["shortest_edge"]), is_square
    crop_pct = _crop_pct_of(image_size[0], size["height"])
    return "squash", crop_pct, math.floor(image_size[1] / crop_pct) == size["width"]


def _crop_pct_of(crop: int, resized: int) -> float:
    """Return a crop_pct with which timm resizes to `resized`, of few digits: 0.9 for a crop of 224 of 248 pixels."""
    exact = crop / resized
    rounded_down = [math.floor(exact * 10**digits) / 10**digits for digits in range(2, 16)]
    for crop_pct in (*_USUAL_CROP_PCTS, *rounded_down):
        if crop_pct > 0 and math.floor(crop / crop_pct) == resized:
            return crop_pct
    return exact
