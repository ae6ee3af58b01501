"""How a released file was evaluated, by its name: no array shows it."""

import re
from pathlib import PurePosixPath

# Those of "Knowledge distillation: A good teacher is patient and consistent", and their teachers; evaluated as
# configs/proj/distill/bit_i1k.py of big_vision does.
_DISTILLED = re.compile(r"R\d+x\d(?:_T)?_(\d+)")
# Of VTAB, the data sets whose images are smaller than 96 x 96 pixels, as big_transfer's files call them.
_SMALL_IMAGES = ("cifar100", "svhn", "eurosat", "dsprites-orientation", "dsprites-xpos")


def preset_of_vit(location: str) -> str:
    """The preset of a vit_jax file: "augreg" or "vit_jax"; only its address or name tells AugReg's files."""
    path = PurePosixPath(location)
    is_augreg = "vit_models/augreg/" in location or re.search(r"-aug_[a-z]+\d?-wd_", path.name)
    return "augreg" if is_augreg else "vit_jax"


def preset_of_bit(location: str) -> str:
    """The preset of a big_transfer file: "bit", or "big_vision" for the distilled ones."""
    return "big_vision" if _DISTILLED.fullmatch(PurePosixPath(location).stem) else "bit"


def image_size_of_bit(location: str) -> int:
    """The height and width in pixels that a file of gs://bit_models was made for.

    Fine-tuned files follow BiT-HyperRule (bit_hyperrule.py of big_transfer): 128 where images are smaller than
    96 x 96, else 480.
    """
    name = PurePosixPath(location).stem
    if match := re.search(r"-run\d-(.+)$", name):
        return 128 if match[1] in _SMALL_IMAGES else 480
    if match := _DISTILLED.fullmatch(name):
        return int(match[1])
    return 480 if name.endswith("-ILSVRC2012") else 224
