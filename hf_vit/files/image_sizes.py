"""Keep the image sizes of a model and its image processor equal."""

import os
from typing import Any

from transformers.utils import logging

from ..models.image_processing_hf_vit import PRESETS, HfViTImageProcessor
from ..models.sizes import Size, as_pair

logger = logging.get_logger(__name__)


def sync_processor_size(
    model: Any, processor: HfViTImageProcessor, name: str | os.PathLike, is_requested: bool
) -> None:
    """Set an image processor to the model's image size.

    Args:
        model: a model with `config.image_size`.
        name: folder or name on the Hub, for the warning.
        is_requested: the user chose the image size or the preset. Otherwise, a warning is logged if the size changes,
            and a processor whose images have different sizes is not changed.
    """
    own = output_size(processor)
    wanted = as_pair(model.config.image_size)
    if not is_requested and own != wanted:
        if processor.preset == "native" or (own is None and not processor.do_resize):
            return
        found = "images of different sizes" if own is None else f"{own[0]} x {own[1]}"
        logger.warning(
            f"The model of {name} takes images of {wanted[0]} x {wanted[1]} pixels, but its image processor returns "
            f"{found}; the processor was set to the model's size. Save both to keep this."
        )
    set_processor_size(processor, wanted)


def output_size(processor: HfViTImageProcessor) -> tuple[int, int] | None:
    """Return (height, width) of the images that an image processor returns; None if sizes vary."""
    if processor.preset == "native" or not (processor.do_center_crop or processor.do_resize):
        return None
    size = processor.crop_size if processor.do_center_crop else processor.size
    return (size["height"], size["width"]) if "height" in size else None


def set_processor_size(processor: HfViTImageProcessor, image_size: Size) -> None:
    """Set the output size of an image processor.

    If the processor crops, the size of the resize changes by the preset's rule, or in proportion to the crop.

    Args:
        processor: the image processor; it is changed in place.
        image_size: an int or (height, width) in pixels.
    """
    if output_size(processor) == as_pair(image_size):
        return
    height, width = as_pair(image_size)
    wanted = {"height": height, "width": width}
    crops = processor.do_center_crop
    preset = PRESETS[processor.preset]
    if not crops:
        sizes = {"size": wanted}
    elif preset.crop_pct is not None and preset.sizes(processor.crop_size)["size"] == processor.size:
        sizes = preset.sizes(wanted)
    else:
        size = dict(processor.size)
        crop = dict(processor.crop_size)
        longest = max(crop.values())
        if "shortest_edge" in size:
            size = {"shortest_edge": round(size["shortest_edge"] * max(wanted.values()) / longest)}
        else:
            size = {side: round(size[side] * wanted[side] / crop[side]) for side in wanted}
        sizes = {"size": size, "crop_size": wanted}
    processor.update(**{**sizes, "do_center_crop": crops})
