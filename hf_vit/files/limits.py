"""Size limits of readers, checked against the sizes that a file declares before any memory is allocated.

Modules that travel to the Hub declare their own limits at their top: `models/image_decoding.py` (images),
`models/image_processing_hf_vit.py` (image processors) and `models/sizes.py` (configurations).

Largest published files: BiT-R152x4 has 3.7 GB (a tenth of `MAX_CHECKPOINT_BYTES`), ViT-H/14 2.5 GB, ViT-L/16 1.2 GB. A
ViT-G/14 in float32 has 7.4 GB (a fifth).
"""

import os

MAX_MESSAGE = 4_000  # characters of an error on standard error

MAX_CHECKPOINT_BYTES = 2**35  # size of a download, and total size of a checkpoint's arrays
MAX_ARRAYS = 100_000  # in one checkpoint; ViT-H/14 has 520
_MAX_COMPRESSION = 20  # total size of the arrays / size of the file; weights compress to about nine tenths
_ALWAYS_ALLOWED_BYTES = 2**28  # size of arrays accepted in a file of any size: a head of zeros compresses well


def allowed(what: str) -> bool:
    """Return whether the environment variable `HF_VIT_ALLOW`, a comma-separated list, contains `what`.

    Args:
        what: "large" (files and images above a size limit), "http" (unencrypted URLs) or "private" (hosts on this
            machine and in private networks).
    """
    return what in os.environ.get("HF_VIT_ALLOW", "").replace(" ", "").split(",")


def check_limit(what: str, number: int, most: int, error: type[Exception] = ValueError) -> None:
    """Raise an error for a number above a limit, unless `HF_VIT_ALLOW` contains "large".

    Args:
        what: beginning of the message, which describes the number.
        number: the number.
        most: the limit.
        error: class of the error.
    """
    if number > most and not allowed("large"):
        raise error(f"{what}; at most {most:,} are allowed (set HF_VIT_ALLOW=large to allow more)")


def check_declared(name: str, declared: int, size: int, error: type[Exception] = ValueError) -> None:
    """Raise an error if a file of `size` bytes declares implausibly many bytes of arrays; `name` is for the message."""
    most = min(MAX_CHECKPOINT_BYTES, max(_MAX_COMPRESSION * size, _ALWAYS_ALLOWED_BYTES))
    check_limit(f"{name} declares {declared:,} bytes of arrays for {size:,} bytes on disk", declared, most, error)
