"""Image files of every kind of pixels: a row is a file, and what its array means in levels.

The expected levels come from the array that was written, by the definitions of the formats (PNG, TIFF 6.0).
"""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
import tifffile
from PIL import Image

from hf_vit.files.image_files import IMAGE_FORMATS
from hf_vit.files.pictures import read_size, to_mode
from hf_vit.models.image_decoding import FORMATS
from hf_vit.models.image_reading import ImageReadingError, load_image, read_image

from ..photographs import encode

HEIGHT, WIDTH = 10, 14
RNG = np.random.default_rng(3)
GRAY = RNG.integers(0, 256, (HEIGHT, WIDTH))
COLOR = RNG.integers(0, 256, (HEIGHT, WIDTH, 3))
GRAY[0, :2] = COLOR[0, :2] = 255
GRAY[1, 1] = 0


def gray_of(depth):
    """Gray values of a depth, in units of the file."""
    return (GRAY * (2**depth - 1) / 255).round().astype(np.uint16)


def levels_of(values, depth):
    return values * (255 / (2**depth - 1))


def over_white(levels, is_clear):
    return np.where(is_clear, 255, levels)


def png(depth, color_type, samples, *chunks, rows=HEIGHT):
    """Write a PNG with samples (height, width[, channels]) in units of the file; a chunk is (type, content)."""

    def chunk(kind, content, checksum=None):
        checksum = zlib.crc32(kind + content) if checksum is None else checksum
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    samples = np.asarray(samples).reshape(len(samples), -1)
    bits = (samples[..., None] >> np.arange(depth)[::-1] & 1).astype(np.uint8).reshape(len(samples), -1)
    lines = b"".join(b"\0" + np.packbits(row).tobytes() for row in bits[:rows])
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", WIDTH, HEIGHT, depth, color_type, 0, 0, 0))
    body = b"".join(chunk(*part) for part in chunks)
    return b"\x89PNG\r\n\x1a\n" + header + body + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def tiff(array, **options):
    file = io.BytesIO()
    tifffile.imwrite(file, array, **options)
    return file.getvalue()


def packed_tiff(depth, photometric=1):
    """Write a gray TIFF whose samples of `depth` bits are packed without gaps."""
    values = gray_of(depth)
    values = values if photometric else 2**depth - 1 - values
    bits = (values[..., None] >> np.arange(depth)[::-1] & 1).astype(np.uint8).reshape(HEIGHT, -1)
    data = np.packbits(bits, axis=1).tobytes()
    tags = [(256, WIDTH), (257, HEIGHT), (258, depth), (259, 1), (262, photometric), (273, 8 + 2 + 12 * 9 + 4)]
    tags += [(277, 1), (278, HEIGHT), (279, len(data))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


DEEP = (GRAY * 257).astype(np.uint16)
DEEP_COLOR = (COLOR * 257).astype(np.uint16)
KEY = (2, 3)  # a pixel whose value is transparent


def keyed(depth):
    values = gray_of(depth)
    content = png(depth, 0, values, (b"tRNS", struct.pack(">H", values[KEY])))
    return content, over_white(levels_of(values, depth), values == values[KEY])


def keyed_color(depth):
    values = COLOR * 257 if depth == 16 else COLOR.copy()
    near = values.copy()
    near[4, 5] = values[KEY]
    near[4, 6] = values[KEY] ^ 1  # not the same color
    content = png(depth, 2, near, (b"tRNS", struct.pack(">3H", *values[KEY])))
    return content, over_white(levels_of(near, depth), (near == values[KEY]).all(axis=-1, keepdims=True))


THOUSAND = GRAY * 1000 // 255
RGBA = np.dstack([COLOR, np.where(GRAY > 99, 255, 0)]).astype(np.uint8)
FEW = RGBA.copy()
FEW[:, :7], FEW[:, 7:] = (200, 30, 30, 255), (10, 200, 40, 0)
PLANES = DEEP_COLOR.transpose(2, 0, 1)
INVERTED = {"photometric": "miniswhite"}
ROWS = {
    **{
        f"PNG, gray, {depth} bits": (png(depth, 0, gray_of(depth)), levels_of(gray_of(depth), depth))
        for depth in (1, 2, 4, 8, 16)
    },
    **{f"PNG, gray, {depth} bits, transparent color": keyed(depth) for depth in (1, 2, 4, 8, 16)},
    **{f"PNG, RGB, {depth} bits, transparent color": keyed_color(depth) for depth in (8, 16)},
    "PNG, RGB, 16 bits": (png(16, 2, DEEP_COLOR), COLOR),
    "PNG, RGBA": (encode(Image.fromarray(RGBA)), over_white(COLOR, RGBA[..., 3:] == 0)),
    "PIL image, palette with alpha": (
        Image.fromarray(FEW).quantize(4, method=2),
        over_white(FEW[..., :3], FEW[..., 3:] == 0),
    ),
    "PIL image, LA": (Image.fromarray(RGBA[..., [0, 3]], "LA"), over_white(RGBA[..., 0], RGBA[..., 3] == 0)),
    "PIL image, I": (Image.fromarray(GRAY.astype(np.int32)), GRAY),
    "PGM, 16 bits": (b"P5 %d %d 65535\n" % (WIDTH, HEIGHT) + DEEP.astype(">u2").tobytes(), GRAY),
    "PGM, largest value 1000": (
        b"P5 %d %d 1000\n" % (WIDTH, HEIGHT) + THOUSAND.astype(">u2").tobytes(),
        THOUSAND * 0.255,
    ),
    **{
        f"TIFF, gray, {depth} bits": (packed_tiff(depth), levels_of(gray_of(depth), depth))
        for depth in (1, 2, 4, 8, 10, 12, 14)
    },
    **{
        f"TIFF, white is zero, {depth} bits": (packed_tiff(depth, 0), levels_of(gray_of(depth), depth))
        for depth in (1, 4, 8, 10, 12, 14)
    },
    **{f"TIFF, gray, 16 bits {order}": (tiff(DEEP, byteorder=order), GRAY) for order in "<>"},
    **{
        f"TIFF, white is zero, 16 bits {order}": (tiff(65535 - DEEP, byteorder=order, **INVERTED), GRAY)
        for order in "<>"
    },
    "TIFF, white is zero, 16 bits, deflated": (tiff(65535 - DEEP, compression="zlib", **INVERTED), GRAY),
    "TIFF, white is zero, float32": (tiff((1 - GRAY / 255).astype(np.float32), **INVERTED), GRAY),
    "TIFF, white is zero, float32, deflated": (
        tiff((1 - GRAY / 255).astype(np.float32), compression="zlib", **INVERTED),
        GRAY,
    ),
    **{f"TIFF, gray, {dtype}": (tiff((GRAY / 255).astype(dtype)), GRAY) for dtype in ("float32", "float64")},
    **{f"TIFF, gray, {dtype}": (tiff(GRAY.astype(dtype)), GRAY) for dtype in ("uint8", "uint32", "int16", "int32")},
    "TIFF, RGB, 8 bits": (tiff(COLOR.astype(np.uint8), photometric="rgb"), COLOR),
    "TIFF, RGB, 8 bits, planes": (
        tiff(COLOR.astype(np.uint8).transpose(2, 0, 1), photometric="rgb", planarconfig="separate"),
        COLOR,
    ),
    "TIFF, RGB, 16 bits": (tiff(DEEP_COLOR, photometric="rgb"), COLOR),
    "TIFF, RGB, 16 bits, planes": (tiff(PLANES, photometric="rgb", planarconfig="separate"), COLOR),
    "TIFF, RGB, 16 bits, planes, big-endian": (
        tiff(PLANES, photometric="rgb", planarconfig="separate", byteorder=">"),
        COLOR,
    ),
    "TIFF, RGB, 16 bits, planes, deflated": (
        tiff(PLANES, photometric="rgb", planarconfig="separate", compression="zlib"),
        COLOR,
    ),
    "TIFF, RGB, float32": (tiff((COLOR / 255).astype(np.float32), photometric="rgb"), COLOR),
    "TIFF, RGB, float32, tiles": (tiff((COLOR / 255).astype(np.float32), photometric="rgb", tile=(16, 16)), COLOR),
    "TIFF, RGBA, 8 bits": (
        tiff(RGBA, photometric="rgb", extrasamples=["unassalpha"]),
        over_white(COLOR, RGBA[..., 3:] == 0),
    ),
    "BigTIFF, gray, 16 bits": (tiff(DEEP, bigtiff=True), GRAY),
    **{
        f"JPEG 2000, gray, {depth} bits": (
            encode(Image.fromarray(gray_of(depth).astype(f"u{depth // 8}")), "JPEG2000"),
            levels_of(gray_of(depth), depth),
        )
        for depth in (8, 16)
    },
}


@pytest.mark.parametrize(("file", "expected"), ROWS.values(), ids=ROWS)
def test_levels_of_files(file, expected):
    expected = np.broadcast_to(expected[..., None] if expected.ndim == 2 else expected, (HEIGHT, WIDTH, 3))
    levels = read_image(file).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(levels, expected, atol=0.01)
    rgb = np.asarray(to_mode(load_image(file), "RGB"))  # the door of training
    np.testing.assert_allclose(rgb, expected, atol=0.51)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "deep TIFF"])
def test_orientation(kind, orientation):
    image = Image.fromarray(COLOR.astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    if kind == "deep TIFF":
        data = tiff(PLANES, photometric="rgb", planarconfig="separate", extratags=[(274, 3, 1, orientation, True)])
    else:
        data = encode(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    stored = np.asarray(Image.open(io.BytesIO(encode(image, kind)))) if kind == "JPEG" else COLOR
    expected = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: stored[::-1].transpose(1, 0, 2),
        7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: stored.transpose(1, 0, 2)[::-1],
    }[orientation]
    np.testing.assert_array_equal(read_image(data).permute(1, 2, 0).numpy(), expected)
    assert read_size(data) == expected.shape[:2]
    np.testing.assert_array_equal(np.asarray(to_mode(load_image(data), "RGB")), expected)


GARBAGE = Image.fromarray(COLOR.astype(np.uint8))
METADATA = {
    "PNG, EXIF": png(8, 2, COLOR, (b"eXIf", b"garbage")),
    "PNG, ICC profile of 2 MB": png(8, 2, COLOR, (b"iCCP", b"icc\0\0" + zlib.compress(bytes(2_000_000)))),
    "PNG, text of 2 MB": png(8, 2, COLOR, (b"zTXt", b"Comment\0\0" + zlib.compress(b"a" * 2_000_000))),
    "PNG, XMP of 2 MB": png(8, 2, COLOR, (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(bytes(2_000_000)))),
    "PNG, checksum of a comment": png(8, 2, COLOR, (b"tEXt", b"Comment\0hello", 1)),
    "WebP, EXIF": encode(GARBAGE, "WEBP", lossless=True, exif=b"Exif\0\0garbage"),
}


@pytest.mark.parametrize("file", METADATA.values(), ids=METADATA)
def test_damaged_metadata_do_not_decide_over_pixels(file):
    np.testing.assert_array_equal(read_image(file).permute(1, 2, 0).numpy(), COLOR)


def test_a_short_segment_of_a_jpeg():
    whole = encode(GARBAGE, "JPEG")
    damaged = whole[:2] + b"\xff\xe0\0\x08JFIF\0\1" + whole[2:]
    np.testing.assert_array_equal(read_image(damaged).numpy(), read_image(whole).numpy())


BANDS = np.dstack([COLOR, COLOR[..., :2]]).astype(np.uint8)
REFUSED = {
    "PNG, rows missing": (png(8, 2, COLOR, rows=4), "172"),
    "PNG, palette missing": (png(8, 3, GRAY), "palette"),
    "PNG, checksum of the transparent color": (png(8, 2, COLOR, (b"tRNS", bytes(6), 1)), "tRNS"),
    "TIFF, five bands": (tiff(BANDS, photometric="minisblack", planarconfig="contig"), "5"),
    "TIFF, int16": (tiff((GRAY * 100).astype(np.int16)), "25500"),
    "TIFF, uint32": (tiff((GRAY * 2**24).astype(np.uint32)), "4278190080"),
    "TIFF, RGB of float above 1": (tiff(COLOR.astype(np.float32), photometric="rgb"), "255"),
    "TIFF, RGB, float32, deflated": (
        tiff((COLOR / 255).astype(np.float32), photometric="rgb", compression="zlib"),
        "32",
    ),
    "PIL image, I": (Image.fromarray(GRAY.astype(np.int32) * 257), "65535"),
    "empty": (b"", "empty"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n", "git lfs pull"),
    "float, too large": (np.full((4, 5, 3), 1.00001), "1.00001"),
    "float16, too large": (np.full((4, 5, 3), 1.004, np.float16), "1.00"),
    "base64": ("A" * 3000, "3000"),
}


@pytest.mark.parametrize(("file", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_files(file, message):
    with pytest.raises(ImageReadingError, match=message) as caught:
        read_image(file)
    assert len(str(caught.value)) < 300


def test_bands_of_a_tiff_are_channels():
    for array in (BANDS, BANDS.astype(np.uint16) * 257, (BANDS / 255).astype(np.float32)):
        levels = read_image(tiff(array, photometric="minisblack", planarconfig="contig"), num_channels=5)
        np.testing.assert_allclose(levels.permute(1, 2, 0).numpy(), BANDS, atol=0.01)
    with pytest.raises(ImageReadingError, match="5 bands"):
        read_image(tiff(BANDS, photometric="minisblack", planarconfig="contig"), num_channels=6)


def test_rounding_is_clipped():
    levels = read_image((COLOR / 255 * 1.0000005).astype(np.float64)).numpy()
    np.testing.assert_allclose(levels, COLOR.transpose(2, 0, 1), atol=0.01)
    assert read_image(np.full((4, 5, 3), 1 + 2**-10, np.float16)).max() == 255


def test_a_closed_pil_image():
    with Image.open(io.BytesIO(encode(GARBAGE, "JPEG"))) as image:
        pass
    with pytest.raises(ImageReadingError, match="closed"):
        read_image(image)


# JPEG 2000 in color of 5 x 7 pixels, written by OpenJPEG 2.5.0 (opj_compress -n 1 -F 7,5,3,DEPTH,u): a ramp from 1/8 to
# 7/8 of white, and white.
JPEG_2000 = {
    "ramp12": (
        "/0//UQAvAAAAAAAHAAAABQAAAAAAAAAAAAAABwAAAAUAAAAAAAAAAAADCwEBCwEBCwEB/1IADAAAAAEBAAQEAAH/XAAEQGD/ZAAlAAFD"
        "cmVhdGVkIGJ5IE9wZW5KUEVHIHZlcnNpb24gMi41LjD/kAAKAAAAAABpAAH/k8/kyBKKU/hHetdycrIVk+3f0ODiXzcUA545imYAKP4V"
        "ve1fApKI+fONqoYDwpQgqTi99/ufwD5x4BQAXCnDh4uSZAEBBaJXVcA+ceARUFQpuWqVTGxwozwsPVP/2Q=="
    ),
    "ramp16": (
        "/0//UQAvAAAAAAAHAAAABQAAAAAAAAAAAAAABwAAAAUAAAAAAAAAAAADDwEBDwEBDwEB/1IADAAAAAEBAAQEAAH/XAAEQID/ZAAlAAFD"
        "cmVhdGVkIGJ5IE9wZW5KUEVHIHZlcnNpb24gMi41LjD/kAAKAAAAAACQAAH/k8/8MRASilP4R3rXcnKyFZPt39Dg4l83FAOeOYpmACj+"
        "FdjlCIXh+H+TjqnYejI25EG9Zzlp5ViMf0+eSX35YaYpUW34JUZQNMA/MZAUAFwpuToAwj7lNEhJmIgGEhJF31pSEf9/wD8xkBFQVCm5"
        "OgDCPuU0SEmYiAYSElCgAXqpzn//2Q=="
    ),
    "white12": (
        "/0//UQAvAAAAAAAHAAAABQAAAAAAAAAAAAAABwAAAAUAAAAAAAAAAAADCwEBCwEBCwEB/1IADAAAAAEBAAQEAAH/XAAEQGD/ZAAlAAFD"
        "cmVhdGVkIGJ5IE9wZW5KUEVHIHZlcnNpb24gMi41LjD/kAAKAAAAAAAYAAH/k8/kFBQAXCovgID/2Q=="
    ),
    "white16": (
        "/0//UQAvAAAAAAAHAAAABQAAAAAAAAAAAAAABwAAAAUAAAAAAAAAAAADDwEBDwEBDwEB/1IADAAAAAEBAAQEAAH/XAAEQID/ZAAlAAFD"
        "cmVhdGVkIGJ5IE9wZW5KUEVHIHZlcnNpb24gMi41LjD/kAAKAAAAAAAZAAH/k8/8MBQUAFwqL4CA/9k="
    ),
}


@pytest.mark.parametrize("depth", [12, 16])
def test_deep_jpeg_2000_in_color(depth):
    """Pillow gives the upper 8 bits, rounded, of which 256 becomes 0; so a file with zeros is refused."""
    white = 2**depth - 1
    ramp = np.linspace(white // 8, white * 7 // 8, 5 * 7 * 3).astype(int).reshape(5, 7, 3)
    levels = read_image(base64.b64decode(JPEG_2000[f"ramp{depth}"])).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(levels, levels_of(ramp, depth), rtol=0, atol=1.5)
    with pytest.raises(ImageReadingError, match=f"{depth} bits"):
        read_image(base64.b64decode(JPEG_2000[f"white{depth}"]))


def test_suffixes_are_those_of_pillow():
    """Pillow's registry judges; MPO is opened by its JPEG plugin."""
    Image.init()
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in FORMATS or kind == "MPO"}
    assert set(FORMATS) <= set(IMAGE_FORMATS)
    assert known <= {suffix for suffixes in IMAGE_FORMATS.values() for suffix in suffixes}
