"""What a reader accepts at most, checked on what a file declares before memory is taken for it.

What travels to the Hub has its limits at its own top: images in `images/image_reading.py`, image processors in
`images/image_presets.py`, configurations in `models/configuration_hf_vision.py`, weights beside a config.json in
`models/pretrained.py`.

The largest published files: BiT-R152x4 3.7 GB (a tenth of `MAX_CHECKPOINT_BYTES`), ViT-H/14 2.5 GB, ViT-L/16 1.2 GB; a
ViT-G/14 in float32 has 7.4 GB (a fifth).
"""

import os

MAX_TEXT_BYTES = 2**26  # of a JSON, a recipe, an index or labels: 4 times AugReg's index of 51,509 files
MAX_DEPTH = 32  # lists and tables inside each other, in JSON and YAML
MAX_MESSAGE = 4_000  # characters of an error on standard error

MAX_CHECKPOINT_BYTES = 2**35  # of a download, and of all arrays of a checkpoint together
MAX_ARRAYS = 100_000  # in one checkpoint; ViT-H/14 has 520
_MAX_COMPRESSION = 20  # bytes of all arrays for one of the file; weights compress to about nine tenths
_ALWAYS_ALLOWED_BYTES = 2**28  # of arrays in a file, whatever its size: a head of zeros compresses well

HOW_TO_ALLOW = "are read (HF_VIT_ALLOW=large reads more)"


def allowed(what: str) -> bool:
    """Whether the environment variable `HF_VIT_ALLOW`, a list with commas, lifts limits of a kind.

    Args:
        what: "large" (files and images beyond a limit), "http" (addresses without encryption) or "private" (addresses
            of the machine itself and of private networks).
    """
    return what in os.environ.get("HF_VIT_ALLOW", "").replace(" ", "").split(",")


def most_bytes(size: int) -> int:
    """The most bytes of arrays that a file of `size` bytes may declare."""
    return min(MAX_CHECKPOINT_BYTES, max(_MAX_COMPRESSION * size, _ALWAYS_ALLOWED_BYTES))
