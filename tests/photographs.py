"""Pictures for tests: drawn, and real photographs that are not part of the project (their tests may be skipped)."""

import io
import zipfile
from pathlib import Path

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
