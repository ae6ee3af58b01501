"""Pictures for tests: drawn, and real photographs that are not part of the project (their tests may be skipped)."""

import io
import struct
import zipfile
import zlib
from pathlib import Path

import datasets
import numpy as np
from PIL import Image


def read_photographs(shared: Path) -> dict[str, bytes]:
    """Files by name: every eighth ImageNet sample, the COCO cats and one flower of each species."""
    photographs = {"cats": (shared / "data/coco/000000039769.png").read_bytes()}
    with zipfile.ZipFile(shared / "data/imagenet_sample/images.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.lower().endswith((".jpg", ".jpeg")))
        photographs |= {name: archive.read(name) for name in names[::8]}
    with zipfile.ZipFile(shared / "data/flowers12/flowers12.zip") as archive:
        species = {name.split("/")[1]: name for name in archive.namelist() if "/test/" in f"/{name}" and "." in name}
        photographs |= {name: archive.read(name) for name in species.values()}
    return photographs


def pixels_of(photograph: bytes) -> np.ndarray:
    """(height, width, 3) in float64, read by nothing of ours."""
    return np.asarray(Image.open(io.BytesIO(photograph)).convert("RGB")).astype(np.float64)


COLORS = {"blue": (30, 60, 220), "green": (40, 200, 50), "red": (220, 40, 40)}


def draw_picture(color: tuple[int, int, int], rng: np.random.Generator) -> Image.Image:
    """9 x 6 pixels of about one color."""
    pixels = np.clip(np.array(color) + rng.integers(-25, 25, (6, 9, 3)), 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def write_pictures(folder: Path) -> None:
    """One picture in many sizes and modes, turned too; and noise of 16 bits and in floating point."""
    noise = np.random.default_rng(3)
    coarse = Image.fromarray(noise.integers(0, 256, (7, 9, 4), np.uint8)).resize((83, 61), Image.Resampling.BICUBIC)
    pixels = np.clip(np.asarray(coarse) + noise.normal(0, 9, (61, 83, 4)), 0, 255).astype(np.uint8)
    color, clear = Image.fromarray(pixels[..., :3]), Image.fromarray(pixels)
    color.save(folder / "color.png")
    color.save(folder / "color.jpg", quality=90)
    for name, size in {"tall": (31, 97), "small": (17, 13), "large": (2600, 1900), "tiny": (1, 1)}.items():
        color.resize(size).save(folder / f"{name}.png")
    color.convert("L").save(folder / "gray.png")
    clear.save(folder / "transparent.png")
    clear.convert("LA").save(folder / "gray_transparent.png")
    color.quantize(16).save(folder / "palette.png", transparency=3)
    color.convert("CMYK").save(folder / "cmyk.jpg")
    turned = Image.Exif()
    turned[0x0112] = 6
    color.save(folder / "turned.jpg", exif=turned)
    deep = noise.integers(0, 65536, (31, 43), np.uint16)
    Image.fromarray(deep).save(folder / "sixteen_bits.png")
    Image.fromarray((deep / 65535).astype(np.float32)).save(folder / "spectrum.tiff")


def write_colors(root: Path, kinds: tuple[str, ...] = tuple(COLORS), suffix: str = "png", **counts: int) -> Path:
    """Write COUNT pictures of each color into `root`/SPLIT/COLOR/; return `root`."""
    rng = np.random.default_rng(0)
    for split, count in counts.items():
        for kind in kinds:
            (root / split / kind).mkdir(parents=True)
            for number in range(count):
                draw_picture(COLORS[kind], rng).save(root / split / kind / f"{number}.{suffix}")
    return root


def encode(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_chunk(kind: bytes, content: bytes) -> bytes:
    """A part of a PNG, with its length and checksum."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(width: int, height: int) -> bytes:
    """A PNG that declares a size and holds next to nothing of it."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(bytes(1000))) + png_chunk(b"IEND", b"")


def table_of(images: list, labels: list, label) -> datasets.Dataset:
    """A dataset of images and their labels, whose feature is `label`: names of classes, or of `datasets`."""
    kind = datasets.ClassLabel(names=label) if isinstance(label, list) else label
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)


def write_labeled(folder: Path, labels: list[str]) -> Path:
    """Write a picture for each entry of `labels`, and the table with them; return `folder`."""
    write_colors(folder, ("blue",), pictures=len(labels))
    rows = [f"pictures/blue/{number}.png,{names}" for number, names in enumerate(labels)]
    (folder / "labels.csv").write_text("\n".join(["image,labels", *rows]))
    return folder
