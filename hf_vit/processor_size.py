"""Size of the images that an image processor makes, and its agreement with the image size of a model."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils import IMAGE_PROCESSOR_NAME, logging

from .files.output import write_json
from .files.reading import read_json_object
from .models.configuration_hf_vision import Size, as_pair
from .models.image_presets import PRESETS, override_settings
from .models.image_processing_hf_vit import HfViTImageProcessor
from .registration import CONFIGURATIONS

logger = logging.get_logger(__name__)

_MODEL_TYPES = [config_class.model_type for config_class in CONFIGURATIONS]


def let_agree(model: Any, processor: Any, name: str | os.PathLike, asked: bool) -> None:
    """Set an image processor to the model's image size.

    Args:
        name: folder or name on the Hub, for the message.
        asked: the caller chose the size or the preset. Otherwise a change is a warning, and a processor that makes
            images of many sizes is not changed.
    """
    own, wanted = output_size(processor), as_pair(model.config.image_size)
    if not asked and own != wanted:
        if getattr(processor, "preset", None) == "native" or (own is None and not processor.do_resize):
            return
        made = "images of many sizes" if own is None else f"{own[0]} x {own[1]}"
        logger.warning(
            f"The model of {name} takes images of {wanted[0]} x {wanted[1]} pixels, but its image processor makes "
            f"{made}; the processor was set to the model's size. Save both to keep this, or load another size with "
            f"hf_vit.load({str(name)!r}, image_size=...)."
        )
    set_processor_size(processor, model.config.image_size)


def output_size(processor: Any) -> tuple[int, int] | None:
    """Return (height, width) in pixels of the images that an image processor makes; None if sizes vary.

    Args:
        processor: an image processor of any class, or the content of a preprocessor_config.json.
    """
    settings = processor if isinstance(processor, Mapping) else _sizing_of(processor)
    if settings.get("preset") == "native":
        return None
    crops = settings.get("do_center_crop")
    if not crops and settings.get("do_resize") is False:
        return None
    size = settings.get("crop_size" if crops else "size")
    if isinstance(size, int):
        return size, size
    sides = dict(size or {})
    return (sides["height"], sides["width"]) if sides.keys() >= {"height", "width"} else None


def _sizing_of(processor: Any) -> dict[str, Any]:
    """Return the settings that decide the size of images."""
    names = ("preset", "do_resize", "do_center_crop", "size", "crop_size")
    return {name: getattr(processor, name, None) for name in names}


def set_processor_size(processor: Any, image_size: Size) -> None:
    """Set an image processor of any class to an image size, an int or (height, width) in pixels.

    If it crops, the resize keeps its ratio to the crop, or follows the rule of the preset.
    """
    if output_size(processor) == as_pair(image_size):
        return
    sizing = _sizing_of(processor)
    sizes = _sizes_at(sizing, as_pair(image_size))
    if not isinstance(processor, HfViTImageProcessor):
        for name, size in sizes.items():
            setattr(processor, name, size)
    elif _follows_preset(processor):
        height, width = as_pair(image_size)
        processor.update(size={"height": height, "width": width})
    else:
        processor.update(**sizes, do_center_crop=sizing["do_center_crop"])


def _follows_preset(processor: Any) -> bool:
    """Tell whether the sizes before and after the crop, or the number of patches, are the preset's."""
    if processor.preset == "native":
        return True
    if not processor.do_center_crop or "crop_pct" not in PRESETS[processor.preset]:
        return False
    of_preset = override_settings(processor.settings(), {"size": processor.crop_size})
    return of_preset["size"] == processor.size


def _sizes_at(settings: Mapping[str, Any], image_size: tuple[int, int]) -> dict[str, dict[str, int]]:
    """Return the `size`, and the `crop_size` if the processor crops, for another image size."""
    height, width = image_size
    wanted = {"height": height, "width": width}
    if not settings.get("do_center_crop"):
        return {"size": wanted}
    size, crop = (settings[name] for name in ("size", "crop_size"))
    size = {"shortest_edge": size} if isinstance(size, int) else dict(size)
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else dict(crop)
    if "shortest_edge" in size:
        resized = {"shortest_edge": round(size["shortest_edge"] * max(height, width) / max(crop.values()))}
    else:
        resized = {side: round(size[side] * wanted[side] / crop[side]) for side in ("height", "width")}
    return {"size": resized, "crop_size": wanted}


def agreeing_settings(config: Any, stored: Any) -> dict[str, Any] | None:
    """Correct a preprocessor_config.json to the image size of the config.json beside it.

    Returns:
        The corrected settings. None if they agree already, the model is of another package, image sizes vary, or a file
        is damaged (which loading reports).
    """
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        return _agreeing_settings(config, stored)
    return None


def _agreeing_settings(config: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any] | None:
    if config.get("model_type") not in _MODEL_TYPES or "image_size" not in config:
        return None
    wanted, own = as_pair(config["image_size"]), output_size(stored)
    if own in (None, wanted) or {type(side) for side in wanted} != {int}:
        return None
    logger.warning_once(
        f"The model takes images of {wanted[0]} x {wanted[1]} pixels, but its image processor makes {own[0]} x "
        f"{own[1]}; the processor is saved with the model's size."
    )
    if stored.get("image_processor_type") != HfViTImageProcessor.__name__:
        return {**stored, **_sizes_at(stored, wanted)}
    processor = HfViTImageProcessor.from_dict(dict(stored))
    set_processor_size(processor, wanted)
    return {**stored, "size": processor.size, "crop_size": processor.crop_size}


def settle_processor(folder: str | os.PathLike) -> None:
    """Correct the image processor saved in a folder to the size of its model; with a warning."""
    files = [Path(folder) / name for name in ("config.json", IMAGE_PROCESSOR_NAME)]
    if all(file.is_file() for file in files):
        with suppress(ValueError):  # a damaged file; loading reports it
            if (agreeing := agreeing_settings(*map(read_json_object, files))) is not None:
                write_json(files[1], agreeing, sort_keys=True)
