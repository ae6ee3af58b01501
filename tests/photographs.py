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
