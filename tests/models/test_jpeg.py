"""JPEGs decoded as TensorFlow decodes them; the goldens are those of tensorflow-cpu 2.21.0 (tests/goldens)."""

import hashlib
import io
import zipfile

import numpy as np
import pytest
from PIL import Image

from hf_vit.models import image_decoding
from hf_vit.models.image_reading import ImageReadingError, read_image

from ..paths import GOLDENS

DECODED = np.load(GOLDENS / "jpeg.npz")
KINDS = sorted({name.split("/")[0] for name in DECODED.files if name.endswith("/decode_jpeg")})


def file_of(kind):
    return DECODED[f"{kind}/bytes"].tobytes()


def read(image, dct="fast"):
    return read_image(image, jpeg_dct=dct).permute(1, 2, 0).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_equals_tensorflow(kind, tmp_path):
    expected = DECODED[f"{kind}/decode_jpeg"]
    if kind == "orientation_6":  # TensorFlow does not turn it
        expected = np.rot90(expected, -1)
    path = tmp_path / "image.jpg"
    path.write_bytes(file_of(kind))
    opened = Image.open(io.BytesIO(file_of(kind)))
    for source in (path, file_of(kind), {"bytes": file_of(kind), "path": None}, opened):
        np.testing.assert_array_equal(read(source), expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "orientation_6"])
def test_accurate_equals_pillow(kind):
    with Image.open(io.BytesIO(file_of(kind))) as image:
        np.testing.assert_array_equal(read(file_of(kind), "accurate"), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if f"{kind}/window_0" in DECODED])
def test_a_window_equals_decode_and_crop_jpeg_inside(kind):
    """Chroma upsampling changes values at the edges of TensorFlow's windows."""
    whole = read(file_of(kind)) if kind != "orientation_6" else np.rot90(read(file_of(kind)))
    for name in [name for name in DECODED.files if name.startswith(f"{kind}/window_")]:
        top, left, height, width = DECODED[name]
        window = whole[top : top + height, left : left + width]
        cropped = DECODED[name.replace("window_", "cropped_")]
        np.testing.assert_array_equal(window[2:-2, 2:-2], cropped[2:-2, 2:-2])


def test_pil_images_that_were_decoded_or_reduced_keep_their_pixels():
    for change in (Image.Image.load, lambda image: image.draft("RGB", (80, 60)), lambda image: image.draft("L", None)):
        image = Image.open(io.BytesIO(file_of("420")))
        change(image)
        expected = np.asarray(image.copy().convert("RGB"))
        np.testing.assert_array_equal(read(image), expected)


@pytest.mark.parametrize("dct", ["fast", "accurate"])
def test_damaged_files(dct):
    with pytest.raises(ImageReadingError, match="truncated"):
        read(DECODED["truncated/bytes"].tobytes(), dct)
    # bytes before a marker are a warning of libjpeg, which neither Pillow nor TensorFlow refuses
    whole = file_of("444")
    np.testing.assert_array_equal(read(whole[:-2] + bytes(5) + whole[-2:], dct), read(whole, dct))


@pytest.mark.parametrize("dct", ["fast", "accurate"])
def test_the_number_of_scans_is_limited(dct):
    whole = file_of("progressive")
    last = whole.rfind(b"\xff\xda")
    with pytest.raises(ImageReadingError, match=f"at most {image_decoding.MAX_SCANS} "):
        read(whole[:-2] + whole[last:-2] * image_decoding.MAX_SCANS + whole[-2:], dct)
    # data behind the image is no scan: phones append a video
    np.testing.assert_array_equal(read(whole + b"\xff\xda" * 1000, dct), read(whole, dct))


def test_without_simplejpeg(monkeypatch, caplog):
    """Code on the Hub reads JPEGs with the accurate DCT, and says once what this changes."""
    monkeypatch.setattr(image_decoding, "simplejpeg", None)
    monkeypatch.setattr(image_decoding, "_warned", set())
    fast, again, accurate = (read(file_of("420"), dct) for dct in ("fast", "fast", "accurate"))
    np.testing.assert_array_equal(fast, accurate)
    np.testing.assert_array_equal(again, accurate)
    assert caplog.text.count("pip install simplejpeg") == 1


def test_photographs_equal_tensorflow(shared):
    expected = np.load(GOLDENS / "jpeg_photographs.npz")
    with zipfile.ZipFile(shared / "data/imagenet_sample/images.zip") as archive:
        members = {name.split("/")[-1]: name for name in archive.namelist()}
        files = {name: archive.read(members[name]) for name in expected["names"]}
    found = [hashlib.sha256(np.ascontiguousarray(read(data))).hexdigest() for data in files.values()]
    assert found == expected["sha256"].tolist()
