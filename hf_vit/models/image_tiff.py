"""TIFF files that Pillow would refuse, or read with another depth or sense than their tags state."""

import math
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageSequence, TiffImagePlugin, UnidentifiedImageError

from .image_decoding import (
    check_pixels,
    describe_range,
    load_upright,
    open_with_pillow,
    pixels_of,
    to_sixteen_bits,
)

_ORIENTATION = 0x0112  # tag of EXIF and TIFF
# Tags of TIFF 6.0
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER = 256, 257, 258, 259, 262, 266
_STRIP_OFFSETS, _SAMPLES, _ROWS_PER_STRIP, _PLANAR, _PREDICTOR = 273, 277, 278, 284, 317
_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 322, 323, 324, 338, 339
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB = 0, 1, 2  # photometric interpretations
_KINDS = {1: "u", 2: "i", 3: "f"}  # NumPy's letters of the sample formats


class _Tags:
    """Tags of the first page of a TIFF."""

    def __init__(self, file: BinaryIO):
        header = file.read(8)
        if header[2:4] in (b"\x2b\0", b"\0\x2b"):  # BigTIFF
            header += file.read(8)
        self.directory = TiffImagePlugin.ImageFileDirectory_v2(header)
        file.seek(self.directory.next)
        self.directory.load(file)
        self.byte_order = "<" if header.startswith(b"II") else ">"
        self.num_samples = self.directory.get(_SAMPLES, 1)
        bits = self.directory.get(_BITS, (1,))
        formats = self.directory.get(_SAMPLE_FORMAT, (1,))
        self.is_uniform = len(set(bits)) == 1 and len(set(formats)) == 1
        self.bits = bits[0]
        self.kind = _KINDS.get(formats[0], "V")
        self.compression = self.directory.get(_COMPRESSION, 1)
        self.photometric = self.directory.get(_PHOTOMETRIC, _WHITE_IS_ZERO)
        self.planar = self.directory.get(_PLANAR, 1)
        self.extra_samples = self.directory.get(_EXTRA_SAMPLES, ())

    def is_read_here(self) -> bool:
        """Return whether the pixels can be read by the tags, and Pillow would not read them right."""
        is_whole = self.bits in (8, 16, 32, 64) and self.kind != "V"
        is_packed = 8 < self.bits < 16 and self.kind == "u"
        is_readable = self.compression == 1 and self.is_uniform and self.directory.get(_FILL_ORDER, 1) == 1
        is_gray_or_color = self.photometric in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB)
        if not (is_readable and is_gray_or_color and (is_whole or is_packed)):
            return False
        if self.bits == 8:
            return self.kind == "i" or (self.photometric != _RGB and self.num_samples > 2)
        is_interleaved_color = self.photometric == _RGB and self.planar == 1 and (self.bits, self.kind) == (16, "u")
        return not (is_interleaved_color and self.num_samples <= 4)

    def describe(self) -> str:
        kind = {"u": "integers", "i": "signed integers", "f": "floating point"}.get(self.kind, "complex")
        return (
            f"a TIFF with {self.num_samples} samples per pixel of {self.bits} bits ({kind}), "
            f"photometric interpretation {self.photometric} and compression {self.compression}"
        )


def open_tiff(file: BinaryIO) -> Image.Image:
    """Open a TIFF; what Pillow would not read right is read by the tags, of the first page."""
    tags = _Tags(file)
    file.seek(0)
    if tags.is_read_here():
        image = _samples_to_image(_read_samples(file, tags), tags)
        image.format = "TIFF"
        setattr(image, "is_animated", tags.directory.next != 0)  # noqa: B010 - an attribute of Pillow's files
        return image
    try:
        image = open_with_pillow(file)
    except UnidentifiedImageError:
        raise ValueError(f"{tags.describe()}, which is not supported; convert it to PNG, or to .npy") from None
    if tags.planar == 2 and tags.compression == 1 and tags.bits > 8:
        raise ValueError(f"{tags.describe()}, in planes, which is not supported; convert it to PNG, or to .npy")
    return image


def _read_samples(file: BinaryIO, tags: _Tags) -> np.ndarray:
    """Read the samples of an uncompressed TIFF.

    Returns:
        (height, width, samples) in the dtype of the file; integers of 9 to 15 bits are scaled to uint16.

    Raises:
        ValueError: the file is truncated, or it has too many pixels.
    """
    stated = tags.directory
    width, height = stated[_WIDTH], stated[_HEIGHT]
    num_planes = tags.num_samples if tags.planar == 2 else 1
    depth = tags.num_samples // num_planes  # samples per pixel in a plane
    check_pixels(width, height * tags.num_samples)
    if _TILE_OFFSETS in stated:
        columns, rows, offsets = stated[_TILE_WIDTH], stated[_TILE_HEIGHT], stated[_TILE_OFFSETS]
    else:
        columns, rows, offsets = width, min(stated.get(_ROWS_PER_STRIP, height), height), stated[_STRIP_OFFSETS]
    is_packed = tags.bits not in (8, 16, 32, 64)
    dtype = np.dtype(np.uint16)
    if not is_packed:
        dtype = np.dtype(f"{tags.byte_order}{tags.kind}{tags.bits // 8}")
    samples = np.empty((num_planes, height, width, depth), dtype)
    row_bytes = math.ceil(columns * depth * tags.bits / 8)
    places = ((p, y, x) for p in range(num_planes) for y in range(0, height, rows) for x in range(0, width, columns))
    for (plane, top, left), offset in zip(places, offsets, strict=True):
        num_rows = rows if _TILE_OFFSETS in stated else min(rows, height - top)
        file.seek(offset)
        data = file.read(num_rows * row_bytes)
        if len(data) < num_rows * row_bytes:
            raise ValueError("the file is truncated")
        if is_packed:  # the most significant bit first, each row begins with a byte
            bits = np.unpackbits(np.frombuffer(data, np.uint8).reshape(num_rows, row_bytes), axis=1)
            bits = bits[:, : columns * depth * tags.bits].reshape(num_rows, columns, depth, tags.bits)
            block = bits @ (1 << np.arange(tags.bits)[::-1])
        else:
            block = np.frombuffer(data, dtype).reshape(num_rows, columns, depth)
        target = samples[plane, top : top + rows, left : left + columns]
        target[:] = block[: target.shape[0], : target.shape[1]]
    samples = samples.transpose(1, 2, 0, 3).reshape(height, width, -1)
    if is_packed:
        samples = (samples * np.float32(65535 / (2**tags.bits - 1))).round().astype(np.uint16)
    samples = samples.astype(samples.dtype.newbyteorder("="))
    return _invert(samples) if tags.photometric == _WHITE_IS_ZERO else samples


def _invert(samples: np.ndarray) -> np.ndarray:
    """Return samples of which white is zero with black at zero."""
    if samples.dtype.kind == "f":
        return 1 - samples
    if samples.dtype.kind == "i":
        raise ValueError("a TIFF of signed integers of which white is zero, which is not supported")
    return np.iinfo(samples.dtype).max - samples


def _samples_to_image(samples: np.ndarray, tags: _Tags) -> Image.Image:
    """Return samples (height, width, samples) of gray, gray and alpha, RGB or RGBA as a PIL image.

    Raises:
        ValueError: there are other bands, or values outside the range of their type.
    """
    num_colors = 3 if tags.photometric == _RGB else 1
    alphas = [num_colors + n for n, kind in enumerate(tags.extra_samples) if kind in (1, 2)]
    if num_colors == 1 and tags.num_samples > 1 + len(alphas):
        raise ValueError(f"it has {tags.num_samples} channels, which are neither gray nor RGB")
    if num_colors == 1 and not alphas:
        image = _band_to_image(samples[..., 0])
    else:
        levels = _to_eight_bits(samples[..., [*range(num_colors), *alphas[:1]]])
        mode = {1: "LA", 2: "LA", 3: "RGB", 4: "RGBA"}[levels.shape[-1]]
        if alphas and tags.extra_samples[alphas[0] - num_colors] == 1:  # color was multiplied by alpha
            mode = {"LA": "La", "RGBA": "RGBa"}[mode]
        image = Image.frombytes(mode, levels.shape[1::-1], levels.tobytes())
        if mode in ("La", "RGBa"):
            image = image.convert(mode.upper())
    image.getexif()[_ORIENTATION] = tags.directory.get(_ORIENTATION, 1)
    return image


def _band_to_image(band: np.ndarray) -> Image.Image:
    """Return one band, (height, width), as a PIL image of mode "L", "I;16", "I" or "F"."""
    if band.dtype.kind == "f":
        return Image.fromarray(band.astype(np.float32))
    if band.dtype in (np.uint8, np.uint16):
        return Image.fromarray(band)
    return Image.fromarray(_to_eight_bits(band))


def _to_eight_bits(samples: np.ndarray) -> np.ndarray:
    """Return samples as uint8: the upper bits of uint16, other integers as they are, floating point times 255."""
    if samples.dtype == np.uint16:
        return (samples >> 8).astype(np.uint8)
    low = samples.min(initial=0)
    high = samples.max(initial=0)
    highest = 1 if samples.dtype.kind == "f" else 255
    if not (low >= 0 and high <= highest):  # also true for NaN
        raise ValueError(f"it has values from {describe_range(low.item(), high.item())} (expected 0 to {highest})")
    return (samples * (255 // highest)).round().astype(np.uint8)


def read_tiff_channels(file: BinaryIO, num_channels: int) -> list[np.ndarray]:
    """Return the channels of a TIFF with one per page, or with bands that Pillow does not read, as `pixels_of`.

    The list is empty for other images.

    Raises:
        ValueError: there are not `num_channels` pages or bands, or their kind is not supported.
    """
    file.seek(0)
    if file.read(4) not in TiffImagePlugin.PREFIXES:
        return []
    file.seek(0)
    tags = _Tags(file)
    if tags.directory.next == 0 and (tags.num_samples == 1 or not tags.is_read_here()):
        return []
    if tags.directory.next == 0:
        found = f"{tags.num_samples} bands"
        channels = _read_samples(file, tags) if tags.num_samples == num_channels else None
        if channels is not None:
            return [pixels_of(_band_to_image(channels[..., band])) for band in range(num_channels)]
    else:
        try:
            pages: Any = open_with_pillow(file)
        except UnidentifiedImageError:
            raise ValueError(f"{tags.describe()}, with several pages, which is not supported; use .npy") from None
        found = f"{pages.n_frames} pages"
        if pages.n_frames == num_channels:
            check_pixels(pages.width, pages.height * num_channels)
            return [pixels_of(load_upright(page)) for page in ImageSequence.Iterator(pages)]
    raise ValueError(f"it has {found} (expected one for each channel, {num_channels})")


def apply_tags(image: TiffImagePlugin.TiffImageFile) -> Image.Image:
    """Return a TIFF that Pillow decoded with the depth and the sense that its tags state."""
    tags = image.tag_v2
    bits = tags.get(_BITS, (1,))[0]
    is_inverted = tags.get(_PHOTOMETRIC, _WHITE_IS_ZERO) == _WHITE_IS_ZERO
    kind = _KINDS.get(tags.get(_SAMPLE_FORMAT, (1,))[0], "V")
    if image.mode.startswith("I;16") and (bits < 16 or is_inverted):
        whole = to_sixteen_bits(np.array(image).astype(np.uint16), bits)
        return Image.fromarray(65535 - np.array(whole)) if is_inverted else whole
    if image.mode == "F" and is_inverted:
        return Image.fromarray(1 - np.array(image))
    if image.mode == "I" and kind == "u":
        return _band_to_image(np.array(image).view(np.uint32))
    if image.mode == "L" and kind == "i":
        return _band_to_image(np.array(image).view(np.int8))
    return image
