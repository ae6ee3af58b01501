"""Decoding of JPEG files with the fast integer DCT, as TensorFlow decodes them.

A decoder may compute the inverse discrete cosine transform (DCT) in several ways, and the pixels differ. TensorFlow's
`decode_jpeg`, `decode_image` and `decode_and_crop_jpeg` use libjpeg's fast integer transform (JDCT_IFAST) by default,
so the original models were trained and evaluated on its pixels. Pillow uses the accurate one (JDCT_ISLOW). Of
photographs, 50 to 70 % of the values differ, by up to 5 levels, and logits of Ti/16 by up to 1.1.
"""

import logging
import re
from typing import Any

import numpy as np

try:  # for code on the Hub, transformers requires every import that is not in a `try`
    import simplejpeg
except ImportError:
    simplejpeg: Any = None

logger = logging.getLogger(__name__)

# A progressive file of a few kilobytes can ask for thousands of scans over all pixels.
MAX_SCANS = 100
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")  # neither a stuffed 0 nor a restart marker
_SCAN, _END = 0xDA, 0xD9
_COLORS = {"Gray": "GRAY", "YCbCr": "RGB", "RGB": "RGB", "CMYK": "CMYK"}
_warned: set[str] = set()


def has_fast_dct() -> bool:
    """Return whether the fast DCT is available; if it is not, warn once in a process."""
    if simplejpeg is None and not _warned:
        _warned.add("simplejpeg")
        logger.warning(
            "JPEGs are decoded with the accurate DCT, because simplejpeg is not installed: values differ from those of "
            "the original model by up to 5 levels, and logits of Ti/16 by up to 1.1. Run `pip install simplejpeg`."
        )
    return simplejpeg is not None


def check_scans(data: bytes) -> None:
    """Raise ValueError if a JPEG has more than `MAX_SCANS` scans."""
    if data.count(bytes([0xFF, _SCAN])) <= MAX_SCANS:  # metadata and data behind the image are counted too
        return
    num_scans = 0
    position = 2
    while (found := _MARKER.search(data, position)) and data[found.start() + 1] != _END:
        position = found.end() + int.from_bytes(data[found.end() : found.end() + 2], "big")
        num_scans += data[found.start() + 1] == _SCAN
    if num_scans > MAX_SCANS:
        raise ValueError(f"a JPEG with {num_scans} scans; at most {MAX_SCANS} are read")


def decode_fast(data: bytes, has_adobe_marker: bool = True, is_strict: bool = True) -> np.ndarray | None:
    """Decode a JPEG with the fast DCT and fancy upsampling, to the bit as TensorFlow's `decode_jpeg`.

    Args:
        data: the file. Its orientation is not applied.
        has_adobe_marker: its CMYK values are complements, as Adobe stores them.
        is_strict: refuse damaged files; otherwise, decode what libjpeg can recover.

    Returns:
        (height, width) of gray, or (height, width, 3), uint8; None for a color space that is not supported (YCCK).

    Raises:
        ValueError: the file is damaged.
    """
    *_, color, _ = simplejpeg.decode_jpeg_header(data, strict=is_strict)
    if color not in _COLORS:
        return None
    pixels = simplejpeg.decode_jpeg(data, _COLORS[color], fastdct=True, strict=is_strict)
    if color == "Gray":
        return pixels[..., 0]
    if color != "CMYK":
        return pixels
    ink = pixels.astype(np.uint16)
    if not has_adobe_marker:
        ink = 255 - ink
    return (ink[..., :3] * ink[..., 3:] // 255).astype(np.uint8)
