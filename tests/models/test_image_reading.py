"""Reading of images: modes, types, file formats and defects."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, features

from hf_vit.models import image_decoding
from hf_vit.models.image_reading import ImageReadingError, logger, read_image

from ..photographs import encode

HEIGHT, WIDTH = 11, 17
RNG = np.random.default_rng(7)
GRAY = RNG.integers(0, 256, (HEIGHT, WIDTH), dtype=np.uint8)
COLOR = RNG.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
ALPHA = RNG.integers(0, 256, (HEIGHT, WIDTH), dtype=np.uint8)
BACKGROUND = (200, 100, 50)


def read(image, **options):
    """(height, width, channels)"""
    return read_image(image, **options).movedim(-3, -1).numpy()


def repeat(gray):
    return np.repeat(gray[..., None], 3, axis=-1)


def over(color, alpha, background):
    share = alpha[..., None] / 255
    return np.floor(color * share + np.array(background) * (1 - share) + 0.5)


def test_types_of_sources(tmp_path):
    data = encode(Image.fromarray(COLOR))
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    sources = [path, str(path), data, bytearray(data), memoryview(data), io.BytesIO(data)]
    sources += [{"bytes": data, "path": None}, {"bytes": None, "path": str(path)}]
    sources += ["data:image/png;base64," + base64.b64encode(data).decode(), Image.fromarray(COLOR)]
    for source in sources:
        np.testing.assert_array_equal(read(source), COLOR)
    with Image.open(path) as opened:
        np.testing.assert_array_equal(read(opened), COLOR)


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "P", "PA", "1"])
def test_modes_that_pillow_converts(mode):
    image = Image.fromarray(COLOR).convert(mode)
    np.testing.assert_array_equal(read(image), np.asarray(image.convert("RGB")))


def test_gray_is_repeated():
    np.testing.assert_array_equal(read(encode(Image.fromarray(GRAY))), repeat(GRAY))
    np.testing.assert_array_equal(read(Image.fromarray(GRAY), num_channels=1), GRAY[..., None])
    np.testing.assert_array_equal(read(Image.fromarray(GRAY), num_channels=None), GRAY[..., None])


def test_transparent_images_are_composited_on_the_background():
    rgba = Image.fromarray(np.dstack([COLOR, ALPHA]))
    np.testing.assert_array_equal(read(encode(rgba)), over(COLOR, ALPHA, (255, 255, 255)))
    np.testing.assert_array_equal(read(encode(rgba), background=BACKGROUND), over(COLOR, ALPHA, BACKGROUND))
    gray = Image.fromarray(np.dstack([GRAY, ALPHA]), "LA")
    np.testing.assert_array_equal(read(encode(gray), background=BACKGROUND), over(repeat(GRAY), ALPHA, BACKGROUND))


def test_a_transparent_color_of_a_palette_and_of_a_plain_image():
    palette = Image.fromarray(COLOR).quantize(8)
    data = encode(palette, transparency=3)
    colors = np.asarray(palette.convert("RGB"))
    expected = np.where(np.asarray(palette)[..., None] == 3, BACKGROUND, colors)
    np.testing.assert_array_equal(read(data, background=BACKGROUND), expected)
    half = np.where(np.arange(WIDTH)[:, None] < 8, COLOR, (1, 2, 3)).astype(np.uint8)
    data = encode(Image.fromarray(half), transparency=(1, 2, 3))
    np.testing.assert_array_equal(read(data), np.where((half == (1, 2, 3)).all(axis=2, keepdims=True), 255, half))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_precision(kind):
    deep = RNG.integers(0, 65536, (HEIGHT, WIDTH), dtype=np.uint16)
    levels = read(encode(Image.fromarray(deep), kind))
    assert levels.dtype == np.float32
    np.testing.assert_allclose(levels, repeat(deep) / 257, rtol=1e-7)
    big_endian = Image.frombytes("I;16B", (WIDTH, HEIGHT), deep.astype(">u2").tobytes())
    np.testing.assert_array_equal(levels, read(big_endian))
    with pytest.raises(ImageReadingError, match="256"):
        read(Image.fromarray(np.array([[0, 256]], dtype=np.int32)))


def test_floating_point_image():
    image = Image.fromarray((GRAY / 255).astype(np.float32))
    np.testing.assert_array_equal(read(encode(image, "TIFF")), repeat(GRAY))
    with pytest.raises(ImageReadingError, match="255"):
        read(Image.fromarray(np.array([[0, 255]], dtype=np.float32)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_exif_orientation_is_applied(orientation, kind):
    image = Image.fromarray(np.kron(COLOR, np.ones((8, 8, 1), dtype=np.uint8)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = np.asarray(Image.open(io.BytesIO(encode(image, kind))))
    expected = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright[::-1].transpose(1, 0, 2),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: upright.transpose(1, 0, 2)[::-1],
    }[orientation]
    data = encode(image, kind, exif=exif)
    np.testing.assert_array_equal(read(data), expected)
    opened = Image.open(io.BytesIO(data))
    np.testing.assert_array_equal(read(opened), expected)
    assert opened.size == image.size  # the caller's image is left alone
    if kind == "JPEG":
        wanted = (expected.shape[0] // 2, expected.shape[1] // 2)
        reduced = read(data, reduce_to=lambda height, width: wanted if (height, width) == expected.shape[:2] else None)
        assert reduced.shape[:2] == wanted


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "PNG"])
def test_the_first_frame_is_used_with_a_warning(kind, caplog):
    if kind == "WEBP" and not features.check("webp"):
        pytest.skip("Pillow was built without WebP")
    frames = [Image.fromarray(np.full((HEIGHT, WIDTH, 3), level, dtype=np.uint8)) for level in (30, 130, 230)]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    type(logger).warning_once.cache_clear()
    for _ in range(2):
        assert np.abs(read(data).astype(int) - 30).max() <= 1
    (message,) = caplog.messages
    assert kind in message


@pytest.mark.parametrize("kind", ["CMYK JPEG", "WEBP", "AVIF", "BMP", "JPEG2000"])
def test_other_formats(kind):
    image = Image.fromarray(np.kron(COLOR, np.ones((8, 8, 1), dtype=np.uint8)))
    mode, _, kind = kind.rpartition(" ")
    image = image.convert(mode or "RGB")
    try:
        data = encode(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    except (KeyError, OSError):
        pytest.skip(f"Pillow was built without {kind}")
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(read(data), expected)


def test_reduced_decoding_gives_at_least_the_requested_size():
    whole, half = (240, 320), (120, 160)
    data = encode(Image.fromarray(RNG.integers(0, 256, (*whole, 3), dtype=np.uint8)), "JPEG")
    for wanted, got in {whole: whole, (121, 160): whole, half: half, (31, 9): (60, 80), (1, 1): (30, 40)}.items():
        assert read(data, reduce_to=lambda *_, wanted=wanted: wanted).shape[:2] == got


ARRAYS = {
    "int64": COLOR.astype(np.int64),
    "uint64": COLOR.astype(np.uint64),
    "float32": COLOR.astype(np.float32) / 255,
    "longdouble": COLOR / np.longdouble(255),
    "float64": COLOR / 255,
    "uint16": COLOR.astype(np.uint16) * 257,
    "big-endian": COLOR.astype(">u2") * 257,
    "reversed twice": COLOR[::-1][::-1],
    "column-major": np.asfortranarray(COLOR),
    "read-only": np.frombuffer(COLOR.tobytes(), np.uint8).reshape(COLOR.shape),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_types_of_arrays(array):
    np.testing.assert_array_equal(read(array), COLOR)
    np.testing.assert_array_equal(read(array.transpose(2, 0, 1)), COLOR)
    if array.dtype.isnative and array.dtype.itemsize <= 8 and array.flags.writeable and min(array.strides) > 0:
        np.testing.assert_array_equal(read(torch.from_numpy(array)), COLOR)


def test_arrays_of_half_precision_two_dimensions_and_truth_values():
    for dtype in (torch.float16, torch.bfloat16):
        half = (torch.from_numpy(COLOR) / 255).to(dtype)
        assert np.abs(read(half) - COLOR).max() < 1  # level
    np.testing.assert_array_equal(read(GRAY), repeat(GRAY))
    np.testing.assert_array_equal(read(GRAY > 99), repeat(np.where(GRAY > 99, 255, 0)))


def test_alpha_in_arrays_is_the_same_as_in_files():
    rgba = np.dstack([COLOR, ALPHA])
    for array in (rgba, torch.from_numpy(rgba), rgba / 255):
        expected = read(Image.fromarray(rgba), background=BACKGROUND)
        assert np.abs(read(array, background=BACKGROUND) - expected.astype(float)).max() <= 0.5


def test_one_channel_equals_pillows_gray():
    expected = np.asarray(Image.fromarray(COLOR).convert("L"))
    np.testing.assert_array_equal(read(COLOR, num_channels=1)[..., 0], expected)
    assert np.abs(read(COLOR / 255, num_channels=1)[..., 0] - expected).max() <= 0.51


@pytest.mark.parametrize(
    ("image", "options", "channels"),
    [
        (np.zeros((1, 1, 3)), {}, (3, 1, 1)),
        (np.zeros((3, 1, 1)), {}, (3, 1, 1)),
        (np.zeros((3, 5, 3)), {}, (3, 3, 5)),  # NumPy's custom: channels last
        (np.zeros((3, 5, 3)), {"input_data_format": "channels_first"}, (3, 5, 3)),
        (np.zeros((1, 5, 3)), {}, (3, 1, 5)),
        (np.zeros((7, 5, 1)), {}, (3, 7, 5)),
        (np.zeros((2, 3, 5, 7)), {}, (2, 3, 5, 7)),
        (np.zeros((2, 5, 7, 3)), {}, (2, 3, 5, 7)),
        (torch.zeros(3, 5, 3), {}, (3, 5, 3)),  # PyTorch's custom: channels first
        (torch.zeros(6, 5, 9), {"num_channels": 9}, (9, 6, 5)),
    ],
)
def test_the_channel_axis(image, options, channels):
    assert read_image(image, **options).shape == channels


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((5, 6, 7)), r"\(5, 6, 7\)"),
        (np.zeros((0, 6, 3)), r"\(0, 6, 3\)"),
        (np.full((5, 6, 3), np.nan), "nan"),
        (np.full((5, 6, 3), -1), "255"),
        (np.full((5, 6, 3), "x"), "str"),
        (torch.zeros(6, 6, 3, dtype=torch.complex64), r"torch.complex64"),
        (torch.full((6, 6, 3), 2.0).to(torch.float8_e4m3fn), "photo"),
        (torch.zeros(3, 6, 6).to_sparse(), "to_dense"),
        (Image.new("RGB", (0, 5)), r"\(3, 5, 0\)"),
        (17, "NumPy"),
        (b"Dear Sir or Madam,", "photo"),
        ("nowhere.jpg", "nowhere.jpg"),
        (".", "photo"),
        ("data:image/png;base64,!", "photo"),
    ],
)
def test_bad_images_are_refused(image, message):
    with pytest.raises(ImageReadingError, match=message):
        read_image(image, name="photo")


def test_a_wrong_number_of_channels_is_refused():
    with pytest.raises(ImageReadingError, match="3 channels"):
        read_image(COLOR, num_channels=5, input_data_format="channels_last", name="photo")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "WEBP"])
@pytest.mark.parametrize("part", [0.02, 0.5, 0.95])
def test_truncated_files_are_refused(kind, part):
    image = Image.fromarray(RNG.integers(0, 256, (90, 70, 3), dtype=np.uint8))
    data = encode(image, kind)
    with pytest.raises(ImageReadingError, match="photo"):
        read_image(data[: int(len(data) * part)], name="photo")


@pytest.mark.parametrize("of", [bytes, "pil"])
def test_checksums_of_a_png_are_verified(of):
    """The damage is in a stored block of zlib, which a decoder copies without noticing it."""
    pixels = np.random.default_rng(0).integers(0, 256, (9, 13, 3), np.uint8)
    whole = encode(Image.fromarray(pixels), compress_level=0)
    damaged = bytearray(whole)
    damaged[whole.index(b"IDAT") + 40] ^= 4
    assert (read(whole) == pixels).all()
    source = bytes(damaged) if of is bytes else Image.open(io.BytesIO(damaged))
    with pytest.raises(ImageReadingError, match="checksum"):
        read(source, name="photo")


def test_eps_does_not_start_ghostscript(tmp_path, monkeypatch):
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args: pytest.fail("a program was started"))
    data = encode(Image.fromarray(COLOR), "EPS")
    (tmp_path / "picture.jpg").write_bytes(data)
    for source in (tmp_path / "picture.jpg", data, Image.open(io.BytesIO(data))):
        with pytest.raises(ImageReadingError):
            read_image(source)


@pytest.mark.parametrize("brand", [b"heic", b"mif1"])
def test_heic_is_read_with_pillow_heif(brand):
    """The first brand is that of phones; files of other programs begin with the general one."""
    plugin = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed")
    plugin.register_heif_opener()  # to write it
    heic = encode(Image.fromarray(COLOR).resize((64, 48)), "HEIF").replace(b"ftypheic", b"ftyp" + brand)
    np.testing.assert_array_equal(read(heic), np.asarray(plugin.open_heif(io.BytesIO(heic))))


@pytest.mark.parametrize("brand", [b"heic", b"mif1"])
def test_heic_is_refused_with_the_remedy(brand, monkeypatch):
    monkeypatch.setattr(image_decoding, "FORMATS", ["JPEG", "PNG"])  # as without pillow-heif
    with pytest.raises(ImageReadingError, match="pillow-heif"):
        read_image(b"\0\0\0\x18ftyp" + brand + bytes(40))
