"""Evaluation settings of a released file, read from its name, because no array shows them."""

import re
from pathlib import PurePosixPath
from typing import Any

# Students and teachers of "Knowledge distillation: A good teacher is patient and consistent", evaluated as in
# configs/proj/distill/bit_i1k.py of big_vision.
_DISTILLED = re.compile(r"R\d+x\d(?:_T)?_(flowers|food|pet|sun)?(\d+)")
_FLEXIVIT_BASELINE = re.compile(r"vit_b(16|30)_i21k_300ep")
# VTAB's data sets with images smaller than 96 x 96 pixels, under big_transfer's names.
_SMALL_IMAGES = ("cifar100", "svhn", "eurosat", "dsprites-orientation", "dsprites-xpos")


def preset_of_vit(location: str) -> str:
    """Return the preset of a vit_jax file: "augreg" or "vit_jax". Only address or name identify AugReg's files."""
    path = PurePosixPath(location)
    is_augreg = "vit_models/augreg/" in location or re.search(r"-aug_[a-z]+\d?-wd_", path.name)
    return "augreg" if is_augreg else "vit_jax"


def sizes_of_flexivit(location: str) -> tuple[int, int] | None:
    """Return the patch size and image size, in pixels, of a file of gs://big_vision/flexivit; None for any other file.

    A FlexiViT has no patch size of its own. It gets 16, the patch size of the model that it is compared with. The two
    baselines have a fixed patch size, although they are stored like FlexiViTs.
    """
    name = PurePosixPath(location).stem
    if match := _FLEXIVIT_BASELINE.fullmatch(name):
        return int(match[1]), 240
    return (16, 240) if name.startswith("flexivit_") else None


def preprocessing_of_flexivit(location: str) -> dict[str, Any] | None:
    """Return the evaluation settings of a file of gs://big_vision/flexivit; None for any other file.

    Source: big_vision, configs/proj/flexivit. The distilled models (i1k_deit3_distill, i21k_distill) use
    resize(272)|central_crop(240); the others (i21k_sup) use resize_small(272)|central_crop(240).

    Returns:
        Arguments of `HfViTImageProcessor`.
    """
    name = PurePosixPath(location).stem
    if _FLEXIVIT_BASELINE.fullmatch(name):
        return {"preset": "big_vision", "crop_pct": 240 / 272}
    return {"preset": "lit", "size": 272, "do_center_crop": True, "crop_size": 240} if sizes_of_flexivit(name) else None


def preset_of_bit(location: str) -> str:
    """Return the preset of a big_transfer file: "bit", or "big_vision" for distilled models and their teachers."""
    return preprocessing_of_bit(location)["preset"]


def preprocessing_of_bit(location: str) -> dict[str, Any]:
    """Return the evaluation settings of a big_transfer file, as arguments of `HfViTImageProcessor`.

    Source: big_vision, configs/proj/distill: resize_small(160)|central_crop(128) for all data sets except ImageNet.
    """
    match = _DISTILLED.fullmatch(PurePosixPath(location).stem)
    if match is None:
        return {"preset": "bit"}
    return {"preset": "big_vision", **({"crop_pct": 128 / 160} if match[1] else {})}


def image_size_of_bit(location: str) -> int:
    """Return the image size of a file of gs://bit_models, in pixels (height and width are equal).

    Fine-tuned files follow BiT-HyperRule (bit_hyperrule.py of big_transfer): 128 for data sets with images smaller than
    96 x 96, otherwise 480.
    """
    name = PurePosixPath(location).stem
    if match := re.search(r"-run\d-(.+)$", name):
        return 128 if match[1] in _SMALL_IMAGES else 480
    if match := _DISTILLED.fullmatch(name):
        return int(match[2])
    return 480 if name.endswith("-ILSVRC2012") else 224
