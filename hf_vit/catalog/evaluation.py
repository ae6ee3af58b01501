"""How a released file was evaluated, by its name: no array shows it."""

import re
from pathlib import PurePosixPath
from typing import Any

# Those of "Knowledge distillation: A good teacher is patient and consistent", and their teachers; evaluated as
# configs/proj/distill/bit_i1k.py of big_vision does.
_DISTILLED = re.compile(r"R\d+x\d(?:_T)?_(flowers|food|pet|sun)?(\d+)")
_FLEXIVIT_BASELINE = re.compile(r"vit_b(16|30)_i21k_300ep")
# Of VTAB, the data sets whose images are smaller than 96 x 96 pixels, as big_transfer's files call them.
_SMALL_IMAGES = ("cifar100", "svhn", "eurosat", "dsprites-orientation", "dsprites-xpos")


def preset_of_vit(location: str) -> str:
    """The preset of a vit_jax file: "augreg" or "vit_jax"; only its address or name tells AugReg's files."""
    path = PurePosixPath(location)
    is_augreg = "vit_models/augreg/" in location or re.search(r"-aug_[a-z]+\d?-wd_", path.name)
    return "augreg" if is_augreg else "vit_jax"


def sizes_of_flexivit(location: str) -> tuple[int, int] | None:
    """The patch size and the image size of a file of gs://big_vision/flexivit; None for any other.

    A FlexiViT has no patch size of its own: 16 is that of the model it is compared with. The two baselines have one,
    though they are stored as FlexiViTs are.
    """
    name = PurePosixPath(location).stem
    if match := _FLEXIVIT_BASELINE.fullmatch(name):
        return int(match[1]), 240
    return (16, 240) if name.startswith("flexivit_") else None


def preprocessing_of_flexivit(location: str) -> dict[str, Any] | None:
    """How a file of gs://big_vision/flexivit was evaluated: arguments of `HfViTImageProcessor`; None for any other.

    configs/proj/flexivit of big_vision: resize(272)|central_crop(240) of those that were distilled (i1k_deit3_distill,
    i21k_distill), resize_small(272)|central_crop(240) of the others (i21k_sup).
    """
    name = PurePosixPath(location).stem
    if _FLEXIVIT_BASELINE.fullmatch(name):
        return {"preset": "big_vision", "crop_pct": 240 / 272}
    return {"preset": "lit", "size": 272, "do_center_crop": True, "crop_size": 240} if sizes_of_flexivit(name) else None


def preset_of_bit(location: str) -> str:
    """The preset of a big_transfer file: "bit", or "big_vision" for the distilled ones and their teachers."""
    return preprocessing_of_bit(location)["preset"]


def preprocessing_of_bit(location: str) -> dict[str, Any]:
    """How a big_transfer file was evaluated: arguments of `HfViTImageProcessor`.

    configs/proj/distill of big_vision: resize_small(160)|central_crop(128) for all data sets but ImageNet.
    """
    match = _DISTILLED.fullmatch(PurePosixPath(location).stem)
    if match is None:
        return {"preset": "bit"}
    return {"preset": "big_vision", **({"crop_pct": 128 / 160} if match[1] else {})}


def image_size_of_bit(location: str) -> int:
    """The height and width in pixels that a file of gs://bit_models was made for.

    Fine-tuned files follow BiT-HyperRule (bit_hyperrule.py of big_transfer): 128 where images are smaller than
    96 x 96, else 480.
    """
    name = PurePosixPath(location).stem
    if match := re.search(r"-run\d-(.+)$", name):
        return 128 if match[1] in _SMALL_IMAGES else 480
    if match := _DISTILLED.fullmatch(name):
        return int(match[2])
    return 480 if name.endswith("-ILSVRC2012") else 224
