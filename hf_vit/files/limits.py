"""Size limits of readers, checked against the sizes that a file declares before any memory is allocated.

Modules that travel to the Hub declare their own limits at their top: `models/image_reading.py` (images),
`models/image_processing_hf_vit.py` (image processors), `models/configuration_hf_vit.py` (configurations),
`models/pretrained.py` (weights next to a config.json) and `models/utils.py` (JSON).

Largest published files: BiT-R152x4 has 3.7 GB (a tenth of `MAX_CHECKPOINT_BYTES`), ViT-H/14 2.5 GB, ViT-L/16 1.2 GB. A
ViT-G/14 in float32 has 7.4 GB (a fifth).
"""

from ..models.utils import allowed as allowed
from ..models.utils import check_limit as check_limit

MAX_MESSAGE = 4_000  # characters of an error on standard error

MAX_CHECKPOINT_BYTES = 2**35  # size of a download, and total size of a checkpoint's arrays
MAX_ARRAYS = 100_000  # in one checkpoint; ViT-H/14 has 520
_MAX_COMPRESSION = 20  # total size of the arrays / size of the file; weights compress to about nine tenths
_ALWAYS_ALLOWED_BYTES = 2**28  # size of arrays accepted in a file of any size: a head of zeros compresses well


def check_declared(name: str, declared: int, size: int, error: type[Exception] = ValueError) -> None:
    """Raise an error if a file of `size` bytes declares implausibly many bytes of arrays; `name` is for the message."""
    most = min(MAX_CHECKPOINT_BYTES, max(_MAX_COMPRESSION * size, _ALWAYS_ALLOWED_BYTES))
    check_limit(f"{name} declares {declared:,} bytes of arrays for {size:,} bytes on disk", declared, most, error)
