"""Compose images with several handwritten digits each, a data set with several labels per image.

    python benchmarks/several_digits.py MNIST OUT [--images 3000]

Each image has one to four digits in the cells of a 2 x 2 grid, at random offsets and in random colors. The digits of
the test images are in no training image. OUT gets train/, test/ and labels.csv.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from PIL import Image

from hf_vit.data.sources import read_idx

CELL, MARGIN = 32, 4  # pixels of a cell, and by how many a digit of 28 pixels may be moved inside


def compose(digits, labels, rng):
    """Return an image (64, 64, 3) uint8, and the digits in it, without repetitions."""
    canvas = np.zeros((2, CELL, 2, CELL, 3), np.uint8)
    count = rng.integers(1, 5)
    rows = rng.integers(0, len(digits), count)
    for cell, row in zip(rng.permutation(4)[:count], rows, strict=True):
        top, left = rng.integers(0, MARGIN + 1, 2)
        color = rng.integers(128, 256, 3)
        pixels = digits[row][:, :, None] / 255 * color
        canvas[cell // 2, top : top + 28, cell % 2, left : left + 28] = pixels.round()
    return canvas.reshape(2 * CELL, 2 * CELL, 3), sorted(set(labels[rows].tolist()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mnist", type=Path, help="folder with t10k-images-idx3-ubyte.gz and its labels")
    parser.add_argument("output", type=Path)
    parser.add_argument("--images", type=int, default=3000, help="training images; a fifth as many for testing")
    options = parser.parse_args()
    digits = read_idx(options.mnist / "t10k-images-idx3-ubyte.gz")
    labels = read_idx(options.mnist / "t10k-labels-idx1-ubyte.gz")
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits))
    test = len(digits) // 5
    rows = [("image", "labels")]
    for split, chosen, count in (("train", order[test:], options.images), ("test", order[:test], options.images // 5)):
        source = digits[chosen], labels[chosen]
        (options.output / split).mkdir(parents=True)
        for number in range(count):
            image, found = compose(*source, rng)
            name = f"{split}/{number:05d}.png"
            Image.fromarray(image).save(options.output / name)
            rows.append((name, ";".join(map(str, found))))
    with open(options.output / "labels.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
