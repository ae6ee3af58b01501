"""A folder of pictures with planted faults."""

import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps

from ..photographs import encode


@pytest.fixture(autouse=True)
def _fresh_accelerator(fresh_accelerator, blank_figures):
    """Reset Accelerate's state, so that every test can run in this process, and draw no figures."""


def draw(color, rng, size=(96, 80)):
    """Draw random smooth shapes in about one color."""
    coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    fine = Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).resize(size)
    return Image.blend(Image.blend(coarse, fine, 0.3), Image.new("RGB", size, color), 0.4)


@pytest.fixture(scope="session")
def faulty(tmp_path_factory):
    """SPLIT/CLASS/FILE with 44 training and 12 test images, and one planted fault of each kind."""
    root, rng = tmp_path_factory.mktemp("faulty"), np.random.default_rng(0)
    colors = {"blue": (10, 20, 250), "red": (250, 20, 10)}
    for split, count in (("train", 20), ("test", 6)):
        for name, color in colors.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                draw(color, rng).save(root / split / name / f"{number:02}.png")
    draw(colors["blue"], rng).save(root / "train" / "red" / "wrong.png")
    (root / "train" / "blue" / "twice.png").write_bytes((root / "train" / "blue" / "03.png").read_bytes())
    first = Image.open(root / "train" / "blue" / "05.png")
    (root / "train" / "blue" / "near.jpg").write_bytes(
        encode(ImageOps.mirror(first.crop((6, 4, 90, 76))).resize((60, 52)), "JPEG", quality=60)
    )
    tested = Image.open(root / "test" / "red" / "02.png")
    (root / "train" / "red" / "leak.jpg").write_bytes(encode(tested.resize((70, 60)), "JPEG", quality=60))
    draw(colors["red"], rng).point(lambda level: level // 8).save(root / "train" / "red" / "dark.png")
    draw(colors["red"], rng).filter(ImageFilter.GaussianBlur(6)).save(root / "train" / "red" / "blurred.png")
    draw(colors["blue"], rng, (17, 14)).save(root / "train" / "blue" / "tiny.png")
    draw(colors["blue"], rng, (400, 60)).save(root / "train" / "blue" / "long.png")
    (root / "train" / "blue" / "broken.png").write_bytes(b"this is no picture")
    return root
