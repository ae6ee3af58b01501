"""Classify images with an exported program, exactly like hf_vit.

Needs numpy, Pillow, simplejpeg, and onnxruntime or openvino. A deployment folder has a copy of this file and of those
that it imports; predict.py, which calls `main`; and:

| file | content |
| --- | --- |
| program.json | "file": model.onnx or model.xml; "resizes": it takes any size; "scores": softmax, sigmoid or none |
| labels.json | class names by index |
| preprocessing.json | settings of the image processor |
| thresholds.json | limits for `--threshold auto`, `--coverage` and `--reject` |

Levels are pixel intensities from 0 to 255. The program normalizes them.
"""

import argparse
import io
import json
import re
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..files.image_files import images_below
from ..models.image_decoding import describe_range, load_upright, open_image, pixels_of
from ..models.resize_weights import (
    AREA,
    area_weights,
    bilinear_weights,
    center_offset,
    crop_rounding,
    filter_weights,
    shortest_edge_size,
)


class Classifier:
    """The program of a deployment folder, with its labels, preprocessing and thresholds."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.program = self._read("program.json")
        self.labels = self._read("labels.json")
        self.preprocessing = self._read("preprocessing.json")
        self.thresholds = self._read("thresholds.json")

    def _read(self, name):
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    @cached_property
    def run(self) -> Any:
        """Return the loaded program, a function: pixel values (batch, 3, height, width) -> logits (batch, classes)."""
        path = self.folder / self.program["file"]
        if path.suffix == ".onnx":
            import onnxruntime

            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            return lambda pixel_values: session.run(["logits"], {"pixel_values": pixel_values})[0]
        import openvino

        compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return lambda pixel_values: compiled(pixel_values)[0]

    def pixel_values(self, path):
        """Return an image file as the program's input, (1, 3, height, width)."""
        levels = read_image(path, self.preprocessing["background"], self.preprocessing["jpeg_dct"])
        if self.program["resizes"]:
            levels = levels.round().astype(np.uint8)
        else:
            levels = resize_and_crop(levels, self.preprocessing).astype(np.float32)
            if self.preprocessing["do_flip_channel_order"]:
                levels = levels[..., ::-1]
        return np.ascontiguousarray(levels.transpose(2, 0, 1)[None])

    def logits(self, path):
        """Return the logits of an image file, (classes,)."""
        return self.run(self.pixel_values(path))[0]

    def scores(self, logits):
        """Return the scores of the classes, (classes,): probabilities, or the values of a regression."""
        if self.program["scores"] == "softmax":
            exponentials = np.exp(logits - logits.max())
            return exponentials / exponentials.sum()
        if self.program["scores"] == "sigmoid":
            return np.exp(-np.logaddexp(0, -logits))  # without overflow
        return logits

    def is_rejected(self, logits):
        """Return whether an image shows none of the classes: its largest logit is below the limit of that class."""
        index = logits.argmax()
        return logits[index] < np.float32(self.thresholds["rejection"][index])

    def select(self, scores, top_k=5, threshold=None, coverage=None):
        """Return the indices of the `top_k` classes, most likely first; or of those that reach a threshold."""
        order = np.argsort(-scores, kind="stable")
        if threshold is None and coverage is None:
            return order[:top_k]
        if coverage is not None:
            lowest = self.thresholds["coverage"][str(coverage)]
        elif threshold == "auto":
            lowest = self.thresholds["auto"]
        else:
            lowest = threshold
        return order[(scores >= np.asarray(lowest))[order]]


def read_image(path, background, jpeg_dct):
    """Read an image file, upright; transparent parts show the background.

    Args:
        background: red, green and blue.
        jpeg_dct: "fast" or "accurate", the cosine transform of JPEGs.

    Returns:
        Levels (height, width, 3), uint8; of images with more than 8 bits float32.

    Raises:
        ValueError: the image cannot be read.
    """
    Image.MAX_IMAGE_PIXELS = None  # the limit of `open_image` is another
    try:
        if str(path).endswith(".npy"):
            raise ValueError("arrays are read by hf_vit only")
        with open(path, "rb") as file, open_image(file) as image:
            levels = to_levels(pixels_of(load_upright(image, jpeg_dct=jpeg_dct)))
    except Exception as error:  # for a damaged file, decoders raise OSError, SyntaxError, struct.error, ...
        raise ValueError(str(error).partition("\n")[0] or type(error).__name__) from error
    if levels.ndim == 2:
        return np.repeat(levels[..., None], 3, axis=2)
    if levels.shape[2] == 3:
        return levels
    color, alpha = np.split(levels.astype(np.float32), [-1], axis=2)
    blended = (color * alpha + np.float32(background) * (255 - alpha)) / 255
    return blended if levels.dtype == np.float32 else blended.round().astype(np.uint8)


def to_levels(pixels):
    """Convert pixels, as of `pixels_of`, to levels: uint8, or float32 with a precision of 16 bits."""
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == np.uint16:
        return pixels.astype(np.float32) / 257
    low, high = pixels.min().item(), pixels.max().item()
    is_float = pixels.dtype.kind == "f"
    highest = 1 if is_float else 255
    excess = 1e-6 if is_float else 0  # of values that leave [0, 1] by rounding
    if not (low >= -excess and high <= highest + excess):  # also true for NaN
        raise ValueError(f"its values go from {describe_range(low, high)} (expected 0 to {highest})")
    if not is_float:
        return pixels.astype(np.uint8)
    return (pixels.clip(0, 1) * np.float32(65535)).round() / np.float32(257)


def resize_and_crop(levels, settings):
    """Resize and crop levels (height, width, 3) as the image processor with the `settings` of preprocessing.json."""
    resample, output = settings["resample"], settings["resize_output"]
    height, width = levels.shape[:2]
    size = settings["size"]
    if "shortest_edge" in size:
        new_size = shortest_edge_size(height, width, size["shortest_edge"], truncate=output == "rounded")
    else:
        new_size = size["height"], size["width"]
    rows, columns = (range(new) for new in new_size)
    if settings["do_center_crop"]:
        crop = settings["crop_size"]
        rounding = crop_rounding(settings["preset"], output)
        top = center_offset(new_size[0], crop["height"], rounding)
        left = center_offset(new_size[1], crop["width"], rounding)
        rows, columns = range(top, top + crop["height"]), range(left, left + crop["width"])
    if output == "rounded":
        image = Image.fromarray(levels.round().astype(np.uint8)).resize(new_size[::-1], resample)
        return np.array(image)[rows.start : rows.stop, columns.start : columns.stop]
    levels = resize_rows(levels.swapaxes(0, 1), (width, new_size[1], columns), settings).swapaxes(0, 1)
    levels = resize_rows(levels, (height, new_size[0], rows), settings)
    if resample == AREA:
        scales = [np.float32(old) / np.float32(new) for old, new in zip((height, width), new_size, strict=True)]
        levels = levels * (np.float32(1) / (scales[0] * scales[1]))
    return levels.astype(np.uint8) if output == "truncated" else levels


def resize_rows(levels, axis, settings) -> Any:
    """Resize levels (old height, width, 3) along the first axis as TensorFlow does, in float32; `axis` describes it."""
    if settings["resample"] != AREA and not settings["antialias"]:
        first, second, weight = bilinear_weights(*axis)
        rows = levels[first].astype(np.float32)
        return rows + (levels[second] - rows) * weight[:, None, None]
    if settings["resample"] == AREA:
        pixels, weights = area_weights(*axis)
    else:
        pixels, weights = filter_weights(*axis, settings["resample"])
    taps = zip(pixels.T, weights.T.astype(np.float32), strict=True)
    return sum(levels[rows] * weight[:, None, None] for rows, weight in taps)


def printable(text):
    r"""Escape control characters, as \x1b, because labels and file names could control the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: found[0].encode("unicode_escape").decode(), text)


def make_parser(thresholds):
    """Return the parser of the command line, with the options that the thresholds of a folder allow."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image file, or folder: all image files in it")
    parser.add_argument("--top-k", type=int, default=5, metavar="INT", help="number of classes per image (default 5)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--threshold",
        type=lambda text: text if text == "auto" else float(text),
        metavar="SCORE",
        help="print all classes with at least this score; auto: each class's own threshold",
    )
    if thresholds["coverage"]:
        choices = [float(coverage) for coverage in thresholds["coverage"]]
        about = "print the prediction set with this coverage"
        which.add_argument("--coverage", type=float, choices=choices, help=about)
    if thresholds["rejection"] is not None:
        about = "print no class for an image that shows none of them"
        parser.add_argument("--reject", action="store_true", help=about)
    return parser


def main(folder):
    """Classify the images of the command line with the program of a folder; return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for names that the terminal's encoding lacks
    classifier = Classifier(folder)
    options = vars(make_parser(classifier.thresholds).parse_args())
    images = options.pop("images")
    reject = options.pop("reject", False)
    form = "10.4g" if classifier.program["scores"] == "none" else "6.1%"
    status = 0
    paths = []
    for image in map(Path, images):
        try:
            paths += images_below(image) if image.is_dir() else [image]
        except (OSError, ValueError) as error:
            print(printable(str(error)), file=sys.stderr)
            status = 1
    for path in paths:
        try:
            logits = classifier.logits(path)
        except (OSError, ValueError) as error:
            print(printable(f"cannot classify {path}: {error}"), file=sys.stderr)
            status = 1
            continue
        print(printable(str(path)))
        scores = classifier.scores(logits)
        selected = []
        if not (reject and classifier.is_rejected(logits)):
            selected = classifier.select(scores, **options)
        for index in selected:
            print(printable(f"  {scores[index]:{form}}  {classifier.labels[str(index)]}"))
        if len(selected) == 0:
            print("  none of the classes")
    return status
