"""Decoding of an image file to a PIL image with the pixels that the file means; NumPy and Pillow only.

Pillow reads the usual files. The exceptions are here:

| file | what Pillow would do | what is done here |
| --- | --- | --- |
| PNG, damaged pixels, rows or palette missing | read it | an error |
| PNG, JPEG with damaged or very long metadata | refuse it | the metadata are not read |
| PNG with a transparent color, 2, 4 or 3 x 16 bits | compare it with scaled values | it is in units of the file |
| TIFF, white is zero, above 8 bits | return a negative | inverted |
| TIFF of 9 to 15 bits | return the numbers, or refuse it | scaled to 16 bits |
| TIFF, uncompressed: planes, bands, floating point | refuse it, or return noise | read by its tags (image_tiff) |
| JPEG, with the fast DCT | use the accurate one | decoded as by TensorFlow, with simplejpeg |
| JPEG 2000, 9 to 16 bits | gray: shift left; color: white becomes 0 | gray: scaled; color with zeros: an error |

A gray image above 8 bits becomes "I;16" with white at 65535, or "F". Color has 8 bits: of 16 bits, the upper 8 remain.
"""

import base64
import io
import logging
import math
import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

try:  # not `suppress`: for code on the Hub, transformers requires every import that is not in a `try`
    import simplejpeg
except ImportError:
    simplejpeg: Any = None

logger = logging.getLogger(__name__)

# Formats of image files. Other formats are not opened: Pillow starts a program for some (EPS).
FORMATS = ["JPEG", "PNG", "GIF", "BMP", "DIB", "PPM", "TIFF", "WEBP", "JPEG2000", "AVIF"]
try:
    from pillow_heif import register_heif_opener  # pyright: ignore[reportMissingImports] - optional

    register_heif_opener()
    FORMATS.append("HEIF")
except ImportError:
    pass

MAX_NAME = 200  # characters of a path in messages
MAX_PIXELS = 2**27  # limit on the size in the header; the largest photographs have about 100 million pixels
_MAX_TEXT = 2**20  # bytes; Pillow refuses longer text
_PNG = b"\x89PNG\r\n\x1a\n"
_LFS_POINTER = b"version https://git-lfs"
# Chunks of a PNG that decide over its pixels. The first four are critical: no reader may skip them.
_PIXEL_CHUNKS = {b"IHDR", b"PLTE", b"IDAT", b"IEND", b"tRNS", b"acTL", b"fcTL", b"fdAT"}
MAX_SCANS = 100  # of a progressive JPEG; a few kilobytes can ask for thousands of scans over all pixels
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")  # of a JPEG: neither a stuffed 0 nor a restart marker
_SCAN = 0xDA
_END = 0xD9
_COLORS = {"Gray": "GRAY", "YCbCr": "RGB", "RGB": "RGB", "CMYK": "CMYK"}  # of a JPEG -> to decode to
_warned: set[str] = set()
_ORIENTATION_TEXTS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
_ORIENTATION = 0x0112  # tag of EXIF and TIFF
_TO_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageReadingError(ValueError):
    """Raised for an image that cannot be read; the message names the file or the index in the batch."""


def name_image(image: Any, index: int) -> str:
    """Return an image's name for messages: its path if it has one, otherwise its index."""
    path = image.get("path") if isinstance(image, dict) else getattr(image, "filename", image)
    if isinstance(path, str | os.PathLike) and str(path):
        return str(path) if len(str(path)) <= MAX_NAME else f"image {index} ({str(path)[:50]}...)"
    return f"image {index}"


@contextmanager
def convert_errors(name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of some types to an ImageReadingError that names the image."""
    try:
        yield
    except ImageReadingError:
        raise
    except Image.UnidentifiedImageError as error:
        hint = "" if "HEIF" in FORMATS else "; for HEIC: pip install pillow-heif"
        raise ImageReadingError(f"{name} is not an image in one of the formats {', '.join(FORMATS)}{hint}") from error
    except kinds as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ImageReadingError(f"cannot read {name}: {reason}") from error


def open_source(image: Any) -> AbstractContextManager[Any]:
    """Return a context manager with a file object of an image; files that are opened here are closed at its end."""
    if isinstance(image, dict):
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if isinstance(image, bytes | bytearray | memoryview):
        return io.BytesIO(image)
    if isinstance(image, str) and image.startswith(("http://", "https://")):
        raise ValueError("it is an address; hf_vit.predict and hf_vit.embed download it, or pass the path of a file")
    if isinstance(image, str) and image.startswith("data:"):
        return io.BytesIO(base64.b64decode(image.partition(",")[2]))
    if isinstance(image, str | os.PathLike):
        try:
            state = os.stat(image)
        except (OSError, ValueError):
            if len(os.fspath(image)) <= MAX_NAME:
                raise
            characters = len(os.fspath(image))
            hint = "base64 begins with data:image/png;base64,"
            raise ValueError(f"text of {characters} characters, which is no path; {hint}") from None
        if not stat.S_ISREG(state.st_mode):  # opening a pipe would block
            raise ValueError("it is not a regular file")
        return open(image, "rb")
    if hasattr(image, "read"):
        return nullcontext(image)
    raise TypeError(f"expected a path, bytes, PIL image, NumPy array or tensor, got {type(image).__name__}")


def open_image(file: Any) -> Image.Image:
    """Open an image file that is read from an open binary file.

    Raises:
        ValueError: the file is empty, damaged, too large, or of a kind that is not supported.
        UnidentifiedImageError: it is not an image in one of the `FORMATS`.
    """
    try:
        file.seek(0)
    except (AttributeError, io.UnsupportedOperation):
        file = io.BytesIO(file.read())
    start = file.read(len(_LFS_POINTER))
    file.seek(0)
    if not start:
        raise ValueError("the file is empty")
    if start == _LFS_POINTER:
        raise ValueError("it is a pointer of Git LFS, not the image itself; run `git lfs pull`")
    if start.startswith(_PNG):
        return _open_png(file.read())
    if start[:4] in TiffImagePlugin.PREFIXES:
        from .image_tiff import open_tiff  # it imports this file

        return open_tiff(file)
    try:
        return open_with_pillow(file)
    except UnidentifiedImageError:
        if not start.startswith(b"\xff\xd8"):
            raise
        file.seek(0)
        data = _without_metadata(file.read())
    try:
        image = open_with_pillow(io.BytesIO(data))
    except UnidentifiedImageError:
        file.seek(0)
        raise ValueError(f"a JPEG that cannot be read ({_reason('JPEG', file)})") from None
    logger.warning("the metadata of a JPEG are damaged and were not read")
    return image


def open_with_pillow(file: BinaryIO) -> Image.Image:
    """Open an image file of the `FORMATS` with Pillow, and check its size."""
    image = Image.open(file, formats=FORMATS)
    check_pixels(image.width, image.height)
    return image


def check_pixels(width: int, height: int) -> None:
    """Raise ValueError if an image has too many pixels."""
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels; at most {MAX_PIXELS:,} are read")


def _reason(name: str, file: BinaryIO) -> str:
    """Return why Pillow's plugin of a format does not open a file; `Image.open` does not tell."""
    plugin, _ = Image.OPEN[name]
    try:
        plugin(file, "")
    except Exception as error:  # a damaged file can raise any
        return str(error).partition("\n")[0] or type(error).__name__
    return "its content is damaged"


def orientation_of(image: Image.Image) -> int:
    """Return the orientation that the metadata of an image state, from 1 (upright) to 8."""
    try:
        # PngImageFile's own method decodes the image first, to find metadata behind the pixels; `_open_png` moves them.
        orientation = Image.Image.getexif(image).get(_ORIENTATION, 1)
    except Exception as error:  # damaged metadata can raise any
        logger.warning("the EXIF metadata of an image are damaged and were not read: %s", error)
        return 1
    return orientation if orientation in range(1, 9) else 1


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return the upright (height, width) of an image that was opened, without decoding it."""
    if isinstance(image, TiffImagePlugin.TiffImageFile) or orientation_of(image) < 5:
        return image.height, image.width  # Pillow's size of a TIFF is upright
    return image.width, image.height


def load_upright(
    image: Image.Image,
    reduce_to: Callable[[int, int], tuple[int, int]] | None = None,
    jpeg_dct: str = "accurate",
) -> Image.Image:
    """Decode an image that was opened, turn it upright, and apply what the file states about its values.

    Args:
        reduce_to: function that returns the size to which an image of (height, width) will be resized. A JPEG is
            decoded at 1/2, 1/4 or 1/8 of its size, if that is not smaller.
        jpeg_dct: "fast" (as TensorFlow) or "accurate" (as Pillow), the cosine transform of a JPEG that was not decoded
            yet.

    Raises:
        ValueError: the pixels are damaged, or Pillow cannot represent them.
    """
    is_tiff = isinstance(image, TiffImagePlugin.TiffImageFile)
    orientation = 1 if is_tiff else orientation_of(image)  # Pillow turns a TIFF upright when it is decoded
    if reduce_to is not None:
        height, width = reduce_to(*upright_size(image))
        if orientation >= 5:
            height, width = width, height
        image.draft(None, (width, height))
    if image.format == "PNG":
        upright = _load_png(image)
    elif image.format in ("JPEG", "MPO"):
        upright = _load_jpeg(image, jpeg_dct)
    elif image.format == "JPEG2000":
        upright = _load_jpeg2000(image)
    elif image.format == "PPM" and image.mode == "I":  # Pillow scales the file's largest value to 65535
        upright = Image.fromarray(np.array(image).astype(np.uint16))
    else:
        image.load()
        upright = image
        if is_tiff:
            from .image_tiff import apply_tags  # it imports this file

            upright = apply_tags(image)
    if orientation == 1:
        return upright
    turned = upright.transpose(_TO_UPRIGHT[orientation])
    for stated in ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"):
        turned.info.pop(stated, None)
    return turned


def pixels_of(image: Image.Image) -> np.ndarray:
    """Return the pixels of a PIL image.

    Returns:
        (height, width), or (height, width, channels) with gray and alpha, RGB or RGBA. Integers of 8 bits are levels,
        those of uint16 have white at 65535, others are levels; floating-point values have white at 1.
    """
    if image.mode.startswith("I;16"):
        gray = np.array(image).astype(np.uint16)
        if "transparency" not in image.info:
            return gray
        return np.stack([gray, np.where(gray == image.info["transparency"], 0, 65535).astype(np.uint16)], axis=-1)
    if image.mode in ("I", "F"):
        return np.array(image)
    if image.mode in ("LA", "La"):
        mode = "LA"
    elif image.has_transparency_data:
        mode = "RGBA"
    elif image.mode in ("1", "L"):
        mode = "L"
    else:
        mode = "RGB"
    if image.mode != mode:
        image = image.convert(mode)
    return np.array(image)


# JPEG
#
# TensorFlow decodes with libjpeg's fast integer transform (JDCT_IFAST) by default, so the originals were trained
# and evaluated on its pixels. Pillow uses the accurate one (JDCT_ISLOW). Of photographs, 50 to 70 % of the values
# differ, by up to 5 levels, and logits of Ti/16 by up to 1.1.


def _load_jpeg(image: Any, dct: str) -> Image.Image:
    """Decode a JPEG; what Pillow reduced or decoded already keeps its pixels."""
    pixels = None
    if is_unloaded_file(image, "JPEG", "MPO") and image.decoderconfig in ((), (1, 0)):
        is_fast = dct == "fast" and has_fast_dct()
        data = _read_all(image.fp) if is_fast or "progressive" in image.info else b""
        if "progressive" in image.info:
            check_scans(data)
        if is_fast:
            pixels = _decode_fast(image, data)
    if pixels is None or (pixels.ndim == 2) != (image.mode == "L"):  # the mode can be changed by `draft`
        image.load()
        return image
    return Image.fromarray(pixels)


def _decode_fast(image: Any, data: bytes) -> np.ndarray | None:
    """Decode a JPEG that Pillow opened, as `decode_fast`; Pillow decides whether damage is refused."""
    try:
        return decode_fast(data, "adobe" in image.info)
    except ValueError:
        image.load()
        return decode_fast(data, "adobe" in image.info, is_strict=False)


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


def _read_all(file: BinaryIO) -> bytes:
    """Return the content of an open file, which keeps its position."""
    position = file.tell()
    file.seek(0)
    data = file.read()
    file.seek(position)
    return data


def _without_metadata(data: bytes) -> bytes:
    """Return a JPEG without its application segments and comments, but for the color transform of Adobe and EXIF."""
    kept = [data[:2]]
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF and data[position + 1] != 0xDA:
        marker = data[position + 1]
        end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        content = data[position + 4 : end]
        is_used = content.startswith((b"Adobe", b"Exif\0")) and len(content) >= 12
        if is_used or not (0xE0 <= marker <= 0xEF or marker == 0xFE):
            kept.append(data[position:end])
        position = end
    kept.append(data[position:])
    return b"".join(kept)


# PNG


def _open_png(data: bytes) -> Image.Image:
    """Open a PNG after its checksums were verified; only metadata that can hold the orientation are kept."""
    pixels: list[bytes] = []
    metadata: list[bytes] = []
    types = set()
    for start, kind, content, is_intact in _chunks(data):
        chunk = data[start : start + len(content) + 12]
        if kind in _PIXEL_CHUNKS or kind[:1].isupper():
            if not is_intact:
                raise ValueError(f"the file is damaged: the checksum of its chunk {kind.decode('latin-1')} is wrong")
            if kind == b"IDAT" and b"PLTE" not in types and data[25] == 3:
                raise ValueError("its palette is missing")
            pixels.append(chunk)
        elif not is_intact:
            logger.warning("the chunk %s of a PNG is damaged and was not read", kind.decode("latin-1"))
        elif kind == b"eXIf" or (content.startswith(_ORIENTATION_TEXTS) and _is_short(kind, content)):
            metadata.append(chunk)
        types.add(kind)
    image = open_with_pillow(io.BytesIO(b"".join([_PNG, *pixels[:1], *metadata, *pixels[1:]])))
    depth = data[24]
    if depth in (2, 4) and "transparency" in image.info and image.mode == "L":
        image.info["transparency"] *= 255 // (2**depth - 1)  # Pillow scales the pixels to 8 bits, not the color
    return image


def _chunks(data: bytes) -> Iterator[tuple[int, bytes, bytes, bool]]:
    """Yield (start, type, content, whether its checksum is right) of each chunk of a PNG, to its end.

    Raises:
        ValueError: the file is truncated.
    """
    start = len(_PNG)
    kind = b""
    while kind != b"IEND":
        if start + 8 > len(data):
            raise ValueError("the file is truncated")
        length, kind = struct.unpack_from(">I4s", data, start)
        end = start + 8 + length
        if end + 4 > len(data) and kind != b"IEND":
            raise ValueError("the file is truncated")
        checksum = zlib.crc32(memoryview(data)[start + 4 : end])
        stated = int.from_bytes(data[end : end + 4], "big")
        yield start, kind, data[start + 8 : end], checksum == stated or kind == b"IEND"
        start = end + 4


def _is_short(kind: bytes, content: bytes) -> bool:
    """Return whether Pillow reads the text of a chunk of a PNG."""
    rest = content.partition(b"\0")[2]
    if kind == b"zTXt":
        compressed = rest[1:]
    elif kind == b"iTXt" and rest[:1] == b"\1":
        compressed = rest[2:].split(b"\0", 2)[-1]
    else:
        return len(content) < _MAX_TEXT
    decompressor = zlib.decompressobj()
    try:
        decompressor.decompress(compressed, _MAX_TEXT)
    except zlib.error:
        return False
    return not decompressor.unconsumed_tail


def _load_png(image: Any) -> Image.Image:
    """Decode a PNG; rows that its data lack would be zeros, and a color of 16 bits is compared with all its bits."""
    is_new = bool(getattr(image, "tile", None)) and image.tell() == 0
    key = image.info.get("transparency")
    data = image.fp.getvalue() if is_new and isinstance(image.fp, io.BytesIO) else b""
    has_deep_key = bool(data) and image.mode == "RGB" and data[24] == 16 and key is not None
    image.load()
    last_row = image.crop((0, image.height - 1, image.width, image.height))
    if data and (image.info.get("interlace") or last_row.getbbox(alpha_only=False) is None):
        _check_rows(data)
    if not has_deep_key:
        return image
    low = Image.open(io.BytesIO(data))
    low.tile = [tile._replace(args="RGB;16L") for tile in low.tile]  # the lower bytes of the big-endian samples
    samples = np.array(image).astype(np.uint16) * 256 + np.array(low)
    alpha = np.where((samples == key).all(axis=-1), 0, 255).astype(np.uint8)
    rgba = Image.fromarray(np.dstack([np.array(image), alpha]))
    rgba.info = {name: value for name, value in image.info.items() if name != "transparency"}
    return rgba


def _check_rows(data: bytes) -> None:
    """Raise ValueError if the data of a PNG are shorter than its rows."""
    width, height, depth, color = struct.unpack_from(">IIBB", data, 16)
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color]
    passes = [(0, 0, 1, 1)]  # first row, first column, step of the rows, step of the columns
    if data[28]:  # Adam7
        passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    expected = 0
    for top, left, down, right in passes:
        rows = math.ceil((height - top) / down)
        columns = math.ceil((width - left) / right)
        if rows > 0 and columns > 0:
            expected += rows * (1 + math.ceil(columns * bits / 8))  # one byte for the filter
    decompressor = zlib.decompressobj()
    found = 0
    for _, kind, content, _ in _chunks(data):
        if kind == b"IDAT" and found < expected:
            found += len(decompressor.decompress(content, expected - found))
    if found < expected:
        raise ValueError(f"the file is damaged: it has {found} of {expected} bytes of pixels")


# JPEG 2000


def _load_jpeg2000(image: Any) -> Image.Image:
    """Decode a JPEG 2000; the file states its depth, which Pillow scales to 8 or 16 bits."""
    depth = _depth_of_jpeg2000(image.fp) if getattr(image, "tile", None) else None
    image.load()
    if depth is None or depth <= 8:
        return image
    if image.mode.startswith("I;16"):
        return to_sixteen_bits(np.array(image).astype(np.uint16) >> (16 - depth), depth)
    if 0 in np.array(image):
        raise ValueError(
            f"a JPEG 2000 in color of {depth} bits, of which Pillow confuses the largest values with 0; convert it to "
            "PNG or TIFF"
        )
    return image


def _depth_of_jpeg2000(file: BinaryIO) -> int | None:
    """Return the bits of a component, from the segment SIZ of the codestream (ISO 15444-1, A.5.1)."""
    position = file.tell()
    file.seek(0)
    data = file.read()
    file.seek(position)
    start = data.find(b"\xff\x4f\xff\x51")
    return None if start < 0 else (data[start + 42] & 127) + 1


def to_sixteen_bits(values: np.ndarray, depth: int) -> Image.Image:
    """Return gray of a depth up to 16 bits as "I;16", with white at 65535."""
    if depth < 16:
        values = (values.astype(np.float32) * np.float32(65535 / (2**depth - 1))).round()
    return Image.fromarray(values.astype(np.uint16))


def describe_range(low: float, high: float) -> str:
    """Return "LOW to HIGH", with enough digits to tell 1 from 1.000002."""
    if isinstance(low, int):
        return f"{low} to {high}"
    return f"{low:.8g} to {high:.8g}"


def is_unloaded_file(image: Image.Image, *formats: str) -> bool:
    """Return whether a PIL image is a file in one of these formats that was not decoded yet.

    Raises:
        ValueError: its file was closed.
    """
    if not isinstance(image, ImageFile.ImageFile) or not image.tile:
        return False
    try:
        is_open = image.fp is not None and not image.fp.closed
    except (ValueError, AttributeError):  # Pillow puts an error in place of a file that was closed
        is_open = False
    if not is_open:
        raise ValueError("its file was closed before it was decoded; call image.load() inside the `with` block")
    return image.format in formats and image.tell() == 0
