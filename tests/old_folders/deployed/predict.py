"""Classify images exactly like hf_vit. Needs onnxruntime, numpy and Pillow."""

import argparse
import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

HERE = Path(__file__).resolve().parent
LABELS = json.loads((HERE / "labels.json").read_text(encoding="utf-8"))
SETTINGS = json.loads((HERE / "preprocessing.json").read_text(encoding="utf-8"))
THRESHOLDS = json.loads((HERE / "thresholds.json").read_text(encoding="utf-8"))
MAX_PIXELS = 2**27  # a small file can declare an image that fills the memory
Image.MAX_IMAGE_PIXELS = None  # `read` has the limit
Image.init()
FORMATS = [name for name in ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000", "AVIF") if name in Image.OPEN]


@cache
def program():
    """Load the model."""
    return onnxruntime.InferenceSession(HERE / "model.onnx", providers=["CPUExecutionProvider"])


def read(path):
    """Read an image file, upright, as levels (height, width, 3); transparent parts show the background."""
    image = Image.open(path, formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"it has {image.width} x {image.height} pixels; at most {MAX_PIXELS:,} are read")
    image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":
        return read_deep(np.array(image))
    if image.mode not in ("LA", "PA", "RGBA") and "transparency" not in image.info:
        return np.array(image.convert("RGB"))
    color, alpha = np.split(np.array(image.convert("RGBA"), np.float32), [3], axis=2)
    return ((color * alpha + np.float32(SETTINGS["background"]) * (255 - alpha)) / 255).round().astype(np.uint8)


def read_deep(values):
    """Convert integers of 16 bits, or floating point from 0 to 1, to levels from 0 to 255."""
    highest = 1 if values.dtype.kind == "f" else 65535
    if not (values.min() >= 0 and values.max() <= highest):
        raise ValueError(f"its values go from {values.min()} to {values.max()} (expected 0 to {highest})")
    levels = (values.astype(np.float32) * np.float32(65535 // highest)).round() / np.float32(257)
    return np.repeat(levels[..., None], 3, axis=2)


def resize_rows(levels, new):
    """TensorFlow's bilinear resize along the first axis, in its float32 arithmetic."""
    old = len(levels)
    scale = np.float32(old) / np.float32(new)
    position = (np.arange(new, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    below = np.floor(position)
    first = levels[np.maximum(below, 0).astype(int)].astype(np.float32)
    second = levels[np.minimum(np.ceil(position), old - 1).astype(int)]
    return first + (second - first) * (position - below)[:, None, None]


def preprocess(levels):
    """Resize levels (height, width, 3) to the program's (1, 3, height, width); the program itself normalizes."""
    height, width = SETTINGS["size"]["height"], SETTINGS["size"]["width"]
    levels = resize_rows(resize_rows(levels.swapaxes(0, 1), width).swapaxes(0, 1), height)
    return np.ascontiguousarray(levels.transpose(2, 0, 1)[None], np.float32)


def compute_logits(path):
    """Return the output of the model, (classes,)."""
    return program().run(None, {"pixel_values": preprocess(read(path))})[0][0]


def scores_of(logits):
    """Return the probabilities of the classes, by the numbers in labels.json."""
    exponentials = np.exp(logits - logits.max())
    return exponentials / exponentials.sum()


def predict(path):
    """Return the scores of an image file, as `scores_of`."""
    return scores_of(compute_logits(path))


def select(scores, top_k=5, threshold=None, coverage=None):
    """Return the numbers of the `top_k` classes, most likely first; or of those that reach a threshold, as hf_vit."""
    order = np.argsort(-scores, kind="stable")
    if threshold is None and coverage is None:
        return order[:top_k]
    if coverage is not None:
        lowest = THRESHOLDS["coverage"][str(coverage)]
    else:
        lowest = THRESHOLDS["auto"] if threshold == "auto" else float(threshold)
    return order[(scores >= np.asarray(lowest))[order]]


def files_at(path):
    """Return an image file; of a folder all image files, sorted."""
    if not Path(path).is_dir():
        return [path]
    suffixes = {suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS}
    return sorted(file for file in Path(path).rglob("*") if file.suffix.lower() in suffixes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image file, or folder: all image files in it")
    parser.add_argument("--top-k", type=int, default=5, metavar="INT", help="number of classes per image (default 5)")
    which = parser.add_mutually_exclusive_group()
    about = "print all classes with at least this score; auto: each class's own threshold"
    which.add_argument("--threshold", type=lambda text: text if text == "auto" else float(text), metavar="SCORE", help=about)
    given = vars(parser.parse_args())
    images = given.pop("images")
    status = 0
    for path in (path for image in images for path in files_at(image)):
        try:
            logits = compute_logits(path)
        except (OSError, ValueError) as error:
            print(f"cannot classify {path}: {error}", file=sys.stderr)
            status = 1
            continue
        print(path)
        scores = scores_of(logits)
        chosen = select(scores, **given)
        for index in chosen:
            print(f"  {scores[index]:6.1%}  {LABELS[str(index)]}")
        if not len(chosen):
            print("  none of the classes")
    sys.exit(status)
