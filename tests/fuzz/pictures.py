"""Kinds of images: files in many formats, and whatever else a user may call an image."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from hf_vit import HfViTImageProcessor

from ..photographs import encode
from .archives import TENSOR_TYPES, mutate_head, mutate_png, odd_tensor
from .gate import Case, Kind
from .mutators import mutate_bytes, odd_value

_ROWS, _COLUMNS = 30, 41
_PIXELS = np.random.default_rng(0).integers(0, 256, (_ROWS, _COLUMNS, 4), np.uint8)
_PIXELS[:, :20] //= 64  # half of it is smooth
_TOLERANCE = 1e-5


def _within(images: Any) -> str | None:
    """What is wrong with pixel values of mean and deviation 1/2."""
    for image in images:
        array = np.asarray(image)
        if not np.isfinite(array).all() or (array.size and abs(array).max() > 1 + _TOLERANCE):
            return f"pixel values go from {array.min()} to {array.max()}"
    return None


def _exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = orientation, "a picture"
    return exif.tobytes()


class Pictures(Kind):
    """Image files: by path, as bytes, or one of a batch."""

    name = "image"

    def prepare(self, folder: Path) -> None:
        color, alpha = Image.fromarray(_PIXELS[..., :3]), Image.fromarray(_PIXELS)
        gray, deep = color.convert("L"), Image.fromarray(_PIXELS[..., 0].astype(np.uint16) * 257)
        palette, single = color.quantize(16), Image.fromarray(_PIXELS[..., 0] / np.float32(255))
        frames = {"save_all": True, "append_images": [color.rotate(9), color.rotate(99)]}
        self.originals = {
            "jpeg": encode(color, "JPEG", exif=_exif(6), icc_profile=b"x" * 300),
            "progressive": encode(color, "JPEG", progressive=True),
            "gray.jpeg": encode(gray, "JPEG"),
            "cmyk.jpeg": encode(color.convert("CMYK"), "JPEG"),
            "png": encode(color),
            "alpha.png": encode(alpha, exif=_exif(3)),
            "palette.png": encode(palette, transparency=3),
            "deep.png": encode(deep),
            "bit.png": encode(color.convert("1")),
            "apng": encode(color, **frames),
            "webp": encode(color, "WEBP"),
            "lossless.webp": encode(alpha, "WEBP", lossless=True, exif=_exif(8)),
            "frames.webp": encode(color, "WEBP", **frames),
            "gif": encode(palette, "GIF"),
            "frames.gif": encode(color, "GIF", **frames),
            "bmp": encode(color, "BMP"),
            "tiff": encode(color, "TIFF"),
            "lzw.tiff": encode(deep, "TIFF", compression="tiff_lzw"),
            "jpeg.tiff": encode(color, "TIFF", compression="jpeg"),
            "float.tiff": encode(single, "TIFF"),
            "ppm": encode(color, "PPM"),
            "jp2": encode(color, "JPEG2000"),
            "avif": encode(color, "AVIF"),
            "mpo": encode(color, "MPO", **frames),
        }
        self.processors = [
            HfViTImageProcessor("vit_jax", size=14),
            HfViTImageProcessor("timm", size=14, image_mean=0.5, image_std=0.5),
            HfViTImageProcessor("vit_jax", size=14, reduced_decoding=True),
            HfViTImageProcessor("native", size=32, patch_size=8),
        ]
        self.whole = {
            name: {processor(data, return_tensors="np")["pixel_values"][0].tobytes() for processor in self.processors}
            for name, data in self.originals.items()
        }

    def make(self, random: Random) -> Case:
        name = random.choice((*self.originals, "jpeg", "jpeg", "png", "alpha.png", "webp", "gif"))
        data, is_png = self.originals[name], name.endswith("png")
        change = random.choices((mutate_png, mutate_head, mutate_bytes), (is_png, 0.15, 0.85))[0]
        if change is mutate_bytes and not is_png:
            data = mutate_bytes(data, random, list(self.originals.values()))
        else:
            data = change(data, random)
        value = random.choice(self.processors), random.choice(("path", "bytes", "batch", "dictionary"))
        return Case(name, {"picture": data}, value, "same" if is_png and change is not mutate_png else "any")

    def use(self, case: Case, folder: Path) -> Any:
        (processor, way), data, path = case.value, case.files["picture"], str(folder / "picture")
        image = {"path": path, "bytes": data, "batch": [path, data], "dictionary": {"bytes": data, "path": None}}[way]
        return processor(image, return_tensors="np")["pixel_values"]

    def judge(self, case: Case, result: Any) -> str | None:
        if case.expected == "same" and result[0].tobytes() not in self.whole[case.original]:
            return "the pixels are not those of the original, and its checksums deny others"
        return _within(result)


class Objects(Kind):
    """Values of any type that are given to a processor as images."""

    name = "object"

    def prepare(self, folder: Path) -> None:
        self.png = encode(Image.fromarray(_PIXELS[..., :3]))
        (folder / "picture.png").write_bytes(self.png)
        self.path = str(folder / "picture.png")
        plain = {"image_mean": 0.5, "image_std": 0.5}
        self.processors = [
            HfViTImageProcessor("vit_jax", size=14),
            HfViTImageProcessor("timm", size=14, **plain),
            HfViTImageProcessor("native", size=32, patch_size=8),
            HfViTImageProcessor("augreg", size=14, on_error="skip"),
            HfViTImageProcessor("vit_jax", size=14, num_channels=1),
            HfViTImageProcessor("vit_jax", size=14, do_convert_rgb=False, **plain),
            HfViTImageProcessor("transformers", size=14, backend="torch"),
        ]

    def make(self, random: Random) -> Case:
        options: dict[str, Any] = {"return_tensors": random.choice(("pt", "np", None))}
        if random.random() < 0.2:
            options["input_data_format"] = random.choice(("channels_first", "channels_last"))
        return Case("an object", value=(random.choice(self.processors), options, self._object(random, depth=0)))

    def _object(self, random: Random, depth: int) -> Any:
        makers = [_array, _array, _array, _tensor, _tensor, _pillow, _pillow, self._file, self._file, _other]
        makers += [self._list, self._list] if depth < 3 else []
        return random.choice(makers)(random)

    def _list(self, random: Random) -> Any:
        items = [self._object(random, random.choice((1, 2, 3))) for _ in range(random.choice((0, 1, 1, 2, 3)))]
        return random.choice((items, items, tuple(items), iter(items), {"a": items}, [items]))

    def _file(self, random: Random) -> Any:
        data = random.choice((self.png, b"", b"x", mutate_bytes(self.png, random)))
        text = random.choice((
            self.path, "", "x", "nothing.png", "data:image/png;base64,!!", "data:", "\0", "a" * 5_000, "/", ".",
            "/dev/null", "http://[::1", "ftp://x/y", "file:///x", "\ud800", "é" * 300, "~",
            "data:image/png;base64," + "A" * 9,
        ))  # fmt: skip
        closed = io.BytesIO(data)
        closed.close()
        return random.choice((
            data, bytearray(data), memoryview(data), memoryview(data)[::2], text, Path(text), io.BytesIO(data), closed,
            text.encode("utf-8", "replace"), io.StringIO("x"), {"bytes": data, "path": text}, {"path": 3}, {},
            {"bytes": None, "path": text}, {"bytes": text, "path": None}, SimpleNamespace(read=3),
            SimpleNamespace(read=lambda *size: "text"), SimpleNamespace(read=lambda *size: None),
        ))  # fmt: skip

    def use(self, case: Case, folder: Path) -> Any:
        processor, options, value = case.value
        return processor(value, **options)["pixel_values"]

    def judge(self, case: Case, result: Any) -> str | None:
        return _within([image.float() if isinstance(image, torch.Tensor) else image for image in result])


_SHAPES = (
    (), (0,), (3,), (9, 7), (9, 7, 3), (3, 9, 7), (0, 7, 3), (9, 0, 3), (9, 7, 1), (9, 7, 2), (9, 7, 4), (9, 7, 5),
    (2, 9, 7, 3), (2, 3, 9, 7), (1, 1, 1, 9, 3), (1, 1), (1, 1, 3), (3, 3, 3), (3, 1, 1), (1, 4_000, 3), (4_000, 1, 3),
    (0, 3, 9, 7), (9, 7, 0), (2, 2), (4, 4, 4), (0, 0), (9, 7, 3, 1),
)  # fmt: skip
_WIDE = ((3_000, 2_000, 3), (30_000, 20_000, 3), (10**6, 10**6), (2**20, 1, 3), (3, 40_000, 30_000), (2**40, 3, 3))
_ARRAY_TYPES = (
    "u1", "u1", "u1", "f4", "f4", "f8", "f2", "i1", "i2", "i4", "i8", "u2", "u4", "u8", "?", "c8", "c16", "f16", "O",
    "S3", "U3", "M8[s]", "m8[s]", "V3", ">f4", ">u2", ">i4", [("a", "u1"), ("b", "f4")],
)  # fmt: skip


def _array(random: Random) -> Any:
    """An array of some shape, type, layout and numbers."""
    shape, generator = random.choice(_SHAPES), np.random.default_rng(random.getrandbits(32))
    dtype = random.choice(_ARRAY_TYPES)
    numbers = generator.random(shape) if np.dtype(dtype).kind in "fc" else generator.integers(0, 256, shape)
    array = np.zeros(shape, dtype) if np.dtype(dtype).kind in "SUMmV" else np.array(numbers, dtype=dtype)
    if random.random() < 0.2 and array.size and array.dtype.kind in "fiu":
        values = (np.nan, np.inf, -1, 300, 1e30, 70_000) if array.dtype.kind == "f" else (-1, 300, 1, 70_000)
        with np.errstate(all="ignore"):
            array.reshape(-1)[:1] = np.array(random.choice(values)).astype(array.dtype)
    layouts: list[Callable[[], Any]] = [
        lambda: array[::-1] if array.ndim else array,
        lambda: np.broadcast_to(array, array.shape),  # read-only
        lambda: np.repeat(array, 2, 0)[::2] if array.ndim else array,
        lambda: np.asfortranarray(array),
        lambda: np.ma.masked_array(array, mask=np.zeros(array.shape, bool)),
        lambda: np.asmatrix(array) if array.ndim == 2 else array,
        lambda: np.broadcast_to(np.uint8(random.randrange(256)), random.choice(_WIDE)),
        lambda: array.view(np.recarray) if array.dtype.kind in "iuf" else array,
    ]
    return random.choice(layouts)() if random.random() < 0.6 else array


def _tensor(random: Random) -> Any:
    """A tensor of some shape, type and layout."""
    dtype = getattr(torch, random.choice(TENSOR_TYPES))
    tensor = torch.rand(random.choice(_SHAPES), generator=torch.Generator().manual_seed(random.getrandbits(32)))
    tensor = (tensor if dtype.is_floating_point or dtype.is_complex else tensor * 120).to(dtype)
    odd = odd_tensor(tensor, random) if random.random() < 0.66 else tensor
    is_plain = not isinstance(odd, torch.Tensor) or (
        odd.layout is torch.strided and not odd.is_nested and not odd.is_quantized and not odd.is_meta
    )
    return odd if is_plain else tensor  # for others torch's own errors are raised


_MODES = "1 L P RGB RGB RGBA CMYK YCbCr LAB HSV I F LA PA RGBX RGBa La I;16 I;16L I;16B I;16N".split()
_INFORMATION = {
    "transparency": (0, 3, 300, -1, b"", b"\0", b"\xff" * 300, (1, 2, 3), (1, 2), "x", None, [1], 1.5),
    "exif": (b"", b"x", b"Exif\0\0", *map(_exif, range(12)), _exif(6)[:-5], bytes(60), "text", 3),
    "icc_profile": (b"x", 3, None),
}


def _pillow(random: Random) -> Any:
    """A PIL image of some mode, size and information."""
    mode = random.choice(_MODES)
    size = random.choice(((9, 7), (9, 7), (9, 7), (0, 0), (0, 5), (1, 1), (1, 4_000), (4_000, 1), (300, 200)))
    colors = {"I": (0, 1, 255, 65_535, 70_000, -5), "F": (0.0, 1.0, -5.0, 70_000.0, math.nan, math.inf, 0.5)}
    image = Image.new(mode, size, random.choice(colors.get(mode, (0,))))
    step = random.choice(("", "", "", *_INFORMATION, "closed", "palette", "filename"))
    if step in _INFORMATION:
        image.info[step] = random.choice(_INFORMATION[step])
    elif step == "closed":
        image.close()
    elif step == "palette" and mode in ("P", "PA"):
        image.putpalette(random.randbytes(random.choice((0, 3, 9, 768))))
    elif step == "filename":
        image.filename = random.choice((3, "", None, "\ud800", b"x", Path("y"), "n" * 9_000))
    return image


def _other(random: Random) -> Any:
    return random.choice((
        None, 0, 1.5, True, 1j, object(), int, print, range(3), (number for number in range(3)), [[1, 2], [3, 4]],
        [[[1, 2, 3]]], [[[[[[[[[[]]]]]]]]]], [None], [1], [""], frozenset({1}), slice(3), NotImplemented, ...,
        np.uint8(3), np.float32("nan"), torch.Size((3, 4)), Image, io, lambda: 3, b"x".decode, {1: 2}, {1, 2},
        {"a": {"b": []}}, SimpleNamespace(ndim=4, shape=(1, 2, 3, 4)), SimpleNamespace(__array__=lambda: 3),
        odd_value(random),
    ))  # fmt: skip
