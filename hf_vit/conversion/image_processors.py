"""Translation between the image processors of transformers and ours, in both directions."""

import re
from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from ..models.image_processing_hf_vit import HfViTImageProcessor, crop_rounds_half, stored_class
from ..models.image_resizing import AREA
from .tables import ConversionError

logger = logging.get_logger(__name__)

# Field that transformers keeps and ignores. In a preprocessor_config.json: all settings of our image processor. In a
# config.json: fields of our configuration ("config") and the "source" of the weights.
OWN_FIELD = "hf_vit"
# Class, without the ending of its name -> values of fields that its file may leave out, where they differ from those of
# the preset "transformers". ViTHybrid: transformers 4.57. Fields of a file come before them.
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {},
    "ViTHybrid": {"resample": 3, "do_center_crop": True, "crop_size": 224},
    "Siglip": {},
    "Bit": {},
}
_CLASS_ENDING = re.compile("(FeatureExtractor|ImageProcessor(Fast|Pil)?)$")


def translate_processor(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a preprocessor_config.json of any class of transformers into arguments of `HfViTImageProcessor`.

    A file that `nearest_processor` wrote gives our own settings back, unless it was changed later.

    Raises:
        ConversionError: the class is code in the folder, which is not run.
    """
    own = stored.get(OWN_FIELD)
    if own and all(stored.get(name) == value for name, value in nearest_processor(own).items()):
        return own
    name = stored_class(stored) or "ViTImageProcessor"
    if stored.get("auto_map"):
        raise ConversionError(f"the image processor {name} is code in the folder, which hf_vit does not run")
    kind = _CLASS_ENDING.sub("", name)
    if kind not in CLASS_DEFAULTS:
        logger.warning(
            f"the image processor is a {name}, of which hf_vit knows only the fields that it shares with "
            "ViTImageProcessor; compare its pixel values"
        )
    known = HfViTImageProcessor.valid_kwargs.__annotations__
    stated = {field: value for field, value in stored.items() if field in known and value is not None}
    found = {**CLASS_DEFAULTS.get(kind, {}), **stated}
    if not found.get("do_center_crop"):
        found.pop("crop_size", None)
    return {"preset": "transformers", **found}


def beyond_pillow(settings: Mapping[str, Any], rounds_half: bool) -> list[str]:
    """List what decoding and resizing by Pillow, as in timm and transformers, cannot compute of our settings.

    Args:
        settings: settings of an `HfViTImageProcessor`.
        rounds_half: the reader rounds the offset of a center crop as timm does, see `crop_rounds_half`.
    """
    found = []
    own_rounding = crop_rounds_half(settings["preset"], settings["resize_output"])
    if settings["do_center_crop"] and own_rounding != rounds_half:
        found.append("this rounding of the crop's offset (one pixel, for a part of the images)")
    if settings["jpeg_dct"] == "fast":
        found.append("the fast cosine transform of JPEG files")
    if settings["preset"] == "native":
        found.append("patches of images of different sizes")
    if settings["resample"] == AREA:
        found.append("the area filter (written: bilinear)")
    if not settings["antialias"]:
        found.append("a resize without antialiasing")
    if settings["resize_output"] != "rounded":
        found.append(f"levels that are {settings['resize_output']} after the resize, not rounded")
    return found


def mean_and_std(settings: Mapping[str, Any], channels: int) -> dict[str, list[float]]:
    """Return mean and standard deviation of each channel, for levels that are divided by 255."""
    factor = 255.0
    if settings["do_rescale"]:
        factor = 255 * settings["rescale_factor"]
    mean, std = [0.0], [1.0]
    if settings["do_normalize"]:
        mean, std = _as_list(settings["image_mean"]), _as_list(settings["image_std"])
    scaled = {"mean": [value / factor for value in mean], "std": [value / factor for value in std]}
    return {name: values * (channels // len(values)) for name, values in scaled.items()}


def _as_list(value: Any) -> list[float]:
    """Return one number, or a number for each channel, as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def nearest_processor(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessor_config.json of transformers' image processor that is nearest to ours.

    It is a ViTImageProcessor, which squashes images; or, where ours crops, a BitImageProcessor, because
    ViTImageProcessor has no crop before transformers 5. Both resize with Pillow's filters, with antialiasing, and
    round to integers.

    Args:
        settings: settings of an `HfViTImageProcessor`.
    """
    crops = settings["do_center_crop"]
    return {
        "image_processor_type": "BitImageProcessor" if crops else "ViTImageProcessor",
        "do_resize": settings["do_resize"],
        "size": settings["size"],
        "resample": settings["resample"] if isinstance(settings["resample"], int) else 2,  # area is near to bilinear
        **({"do_center_crop": True, "crop_size": settings["crop_size"]} if crops else {}),
        "do_rescale": settings["do_rescale"],
        "rescale_factor": settings["rescale_factor"],
        "do_normalize": settings["do_normalize"],
        "image_mean": settings["image_mean"],
        "image_std": settings["image_std"],
        "do_convert_rgb": settings["do_convert_rgb"] and settings["num_channels"] in (None, 3),
    }
