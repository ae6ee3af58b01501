"""Translation between the image processors of transformers and ours, in both directions."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from transformers.image_utils import SizeDict
from transformers.processing_utils import ImagesKwargs
from transformers.utils import logging

from ..models.image_processing_hf_vit import stored_class
from ..models.resize_weights import AREA, BILINEAR, crop_rounding
from .tables import IMAGENET, ConversionError

logger = logging.get_logger(__name__)

Settings = dict[str, Any]

# Field that transformers keeps and ignores. In a preprocessor_config.json: all settings of our image processor. In a
# config.json: fields of our configuration ("config") and the "source" of the weights.
OWN_FIELD = "hf_vit"
_CLASS_ENDING = re.compile("(FeatureExtractor|ImageProcessor(Fast|Pil)?)$")
# Settings that both have, with one meaning.
_SHARED = (
    *("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_flip_channel_order"),
    *("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "do_convert_rgb"),
    *("preset", "resize_output", "patch_size", "max_num_patches"),
)
_SIZES = ({"height", "width"}, {"shortest_edge"})
# Settings that change pixel values -> the values with which ours are equal.
_ONLY = {
    "do_pad": (None, False),
    "do_color_quantize": (None, False),
    "ensure_multiple_of": (None, 1),
    "keep_aspect_ratio": (None, False),
}
# Fields of a file that say nothing about pixel values.
_SILENT = {
    *("image_processor_type", "feature_extractor_type", "processor_class", "_processor_class", OWN_FIELD),
    *("data_format", "default_to_square", "device", "disable_grouping", "image_seq_length", "input_data_format"),
    *("return_tensors", "do_pad", "pad_size", "crop_size"),
}


# Steps of transformers' image processors. Each function takes all settings of a class, and returns those with which the
# steps of transformers' base class (resize, center crop, rescale, normalize) give the same pixel values.


def _plain(settings: Settings) -> Settings:
    return settings


def _without_crop(settings: Settings) -> Settings:
    return {**settings, "do_center_crop": False}


def _convnext(settings: Settings) -> Settings:
    """Below 384 pixels, crop the share `crop_pct`; from 384 on, stretch."""
    side = settings["size"].get("shortest_edge")
    if not settings["do_resize"] or side is None:
        return settings
    square = {"height": side, "width": side}
    if side >= 384:
        return {**settings, "size": square}
    resized = {"shortest_edge": int(side / settings["crop_pct"])}
    return {**settings, "size": resized, "do_center_crop": True, "crop_size": square}


def _poolformer(settings: Settings) -> Settings:
    """Resize the shorter side to 1 / `crop_pct` of `size`."""
    size, crop_pct = settings["size"], settings["crop_pct"]
    if crop_pct is None:
        return settings
    resized = {name: int(side / crop_pct) for name, side in size.items()}
    if len({*resized.values()}) == 1:
        resized = {"shortest_edge": next(iter(resized.values()))}
    return {**settings, "size": resized}


def _levit(settings: Settings) -> Settings:
    """Resize the shorter side to 256/224 of `size`."""
    size = settings["size"]
    if "shortest_edge" in size:
        size = {"shortest_edge": int(256 / 224 * size["shortest_edge"])}
    return {**settings, "size": size}


def _efficientnet(settings: Settings) -> Settings:
    """Subtract 1 after the rescaling (`rescale_offset`); divide by the deviation once more (`include_top`)."""
    mean, std = (list(values) for values in (settings["image_mean"], settings["image_std"]))
    if not settings["do_normalize"]:
        mean, std = [0.0] * len(mean), [1.0] * len(std)
    if settings["rescale_offset"] and settings["do_rescale"]:
        mean = [value + 1 for value in mean]
    if settings["include_top"]:
        std = [value * again for value, again in zip(std, settings["image_std"], strict=True)]
    return {**settings, "do_normalize": True, "image_mean": mean, "image_std": std}


def _mobilevit(settings: Settings) -> Settings:
    return {**settings, "do_normalize": False}


def _dinov3(settings: Settings) -> Settings:
    """Rescale before the resize, so that levels are not rounded."""
    return {**settings, "resize_output": "float"}


def _siglip2(settings: Settings) -> Settings:
    return {**settings, "preset": "native"}


STEPS: dict[str, Callable[[Settings], Settings]] = {
    **dict.fromkeys(("Beit", "Bit", "Blip", "ChineseCLIP", "CLIP", "DeiT", "Flava", "ImageGPT", "MobileNetV1"), _plain),
    **dict.fromkeys(("EfficientFormer", "MobileNetV2", "OwlViT", "Pvt", "Siglip", "ViT", "ViTHybrid"), _plain),
    **dict.fromkeys(("DPT", "Segformer"), _without_crop),
    "ConvNext": _convnext,
    "DINOv3ViT": _dinov3,
    "EfficientNet": _efficientnet,
    "Levit": _levit,
    "MobileViT": _mobilevit,
    "PoolFormer": _poolformer,
    "Siglip2": _siglip2,
}
# Classes that transformers cannot read without torchvision, or no longer has -> a class with the same fields, and other
# values where the file states none (transformers 5, and 4.57).
READ_AS: dict[str, tuple[str, Settings]] = {
    "DINOv3ViT": ("Pvt", {"resample": BILINEAR}),
    "EfficientFormer": ("DeiT", {"size": {"height": 224, "width": 224}, **IMAGENET}),
    "ViTHybrid": ("Bit", {}),
}


def translate_processor(stored: Mapping[str, Any]) -> Settings:
    """Translate a preprocessor_config.json of any class of transformers into arguments of `HfViTImageProcessor`.

    The class that the file names decides: it completes the fields and says what they mean. A file that
    `nearest_processor` wrote gives our own settings back, unless it was changed later.

    Raises:
        ConversionError: the class has steps that `HfViTImageProcessor` lacks, a field has a value that it cannot
            compute, or the class is code in the folder, which is not run.
    """
    own = _own_settings(stored)
    if own is not None:
        return own
    name = stored_class(stored) or "ViTImageProcessor"
    if stored.get("auto_map"):
        raise ConversionError(f"the image processor {name} is code in the folder, which hf_vit does not run")
    kind = _CLASS_ENDING.sub("", name)
    read_as, defaults = READ_AS.get(kind, (kind, {}))
    reader: Any = getattr(transformers, f"{read_as}ImageProcessorPil", None)
    if kind not in STEPS or reader is None:
        raise ConversionError(
            f"the image processor is a {name}, whose steps hf_vit does not compute{_own_fields(reader)}; convert the "
            "model with a preset that gives the same pixel values, such as --preset transformers"
        )
    stated = {field: value for field, value in stored.items() if value is not None}
    try:
        complete = vars(reader.from_dict({**defaults, **stated}))
    except Exception as error:  # of any kind, for a value of a wrong type
        raise ConversionError(f"the image processor {name} cannot be read: {error}") from error
    values: Settings = {}
    for field in reader.valid_kwargs.__annotations__:
        value = complete.get(field)
        if isinstance(value, SizeDict):
            value = dict(value)
        values[field] = value
    settings = STEPS[kind](values)
    _check_values(name, settings)
    unused = sorted((stated.keys() & complete) - values.keys() - _SILENT)
    for field in ("do_center_crop", "do_normalize"):
        if values.get(field) and not settings[field]:
            unused.append(field)
    if unused:
        logger.warning(f"the image processor {name} has fields without effect: {', '.join(unused)}")
    return _as_arguments(settings)


def _own_settings(stored: Mapping[str, Any]) -> Settings | None:
    """Return our settings in a file that `nearest_processor` wrote; None if it was changed later, or is another's."""
    own = stored.get(OWN_FIELD)
    if not own:
        return None
    for name, value in nearest_processor(own).items():
        if stored.get(name) != value:
            return None
    return own


def _own_fields(reader: Any) -> str:
    """Name the fields of a class of transformers that no other class has, as a part of a sentence."""
    general = ImagesKwargs.__annotations__.keys()
    own = getattr(reader, "valid_kwargs", ImagesKwargs).__annotations__.keys() - general
    return f", with {', '.join(sorted(own))}" if own else ""


def _check_values(name: str, settings: Settings) -> None:
    """Raise ConversionError for a value that changes pixel values and that our image processor cannot compute."""
    refused = {field: settings[field] for field, allowed in _ONLY.items() if settings.get(field) not in allowed}
    size = settings.get("size")
    if settings["do_resize"] and "preset" not in settings and set(size or ()) not in _SIZES:
        refused["size"] = size
    if refused:
        values = ", ".join(f"{field}={value!r}" for field, value in refused.items())
        raise ConversionError(f"the image processor is a {name} with {values}, which hf_vit does not compute")


def _as_arguments(settings: Settings) -> Settings:
    """Return the settings of plain steps as arguments of `HfViTImageProcessor`."""
    found: Settings = {"preset": "transformers"}
    for field in _SHARED:
        value = settings.get(field)
        if isinstance(value, tuple):
            value = list(value)
        if value is not None:
            found[field] = value
    for field in ("do_resize", "do_center_crop", "do_rescale", "do_normalize"):
        found[field] = bool(settings.get(field))
    found["resample"] = int(settings["resample"])
    if not found["do_resize"]:
        found.pop("size", None)
    if not found["do_center_crop"]:
        found.pop("crop_size", None)
    return found


def beyond_pillow(settings: Mapping[str, Any], rounds_half: bool) -> list[str]:
    """List what decoding and resizing by Pillow, as in timm and transformers, cannot compute of our settings.

    Args:
        settings: settings of an `HfViTImageProcessor`.
        rounds_half: the reader rounds the offset of a center crop as timm does, see `center_window`.
    """
    found = []
    rounding = crop_rounding(settings["preset"], settings["resize_output"])
    if settings["do_center_crop"] and (rounding == "half_even") != rounds_half:
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
