"""Classify images with an exported program, exactly like hf_vit.

Needs numpy, Pillow, simplejpeg, and onnxruntime or openvino. A deployment folder has a copy of this file and of those
that it imports; predict.py, which calls `main`; and:

| file | content |
| --- | --- |
| program.json | "file"; "outputs": logits, pooler_output; "resizes": it takes any size; "scores": softmax, ... |
| labels.json | class names by index |
| preprocessing.json | settings of the image processor |
| thresholds.json | limits for `--threshold auto`, `--coverage` and `--reject` |

`hf-vit predict` and `hf-vit embed` call this module too. Levels are pixel intensities from 0 to 255. The program
normalizes them.
"""

import argparse
import io
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..files.image_files import images_below
from ..files.predictions import Batch, ClassRule, predictions_writer, unit_length
from ..files.printable import printable
from ..models.image_decoding import (
    ImageReadingError,
    convert_errors,
    describe_range,
    load_upright,
    name_image,
    open_image,
    open_source,
    pixels_of,
)
from ..models.resize_weights import (
    AREA,
    area_weights,
    bilinear_weights,
    center_window,
    crop_rounding,
    filter_weights,
    shortest_edge_size,
)

PROGRAM = "program.json"
_FEW_IMAGES = 64  # are computed on all cores, one batch after another


class Classifier:
    """The program of a deployment folder, with its labels, preprocessing and thresholds.

    Args:
        folder: the folder.
        num_images: number of images that will be computed. For many, each core reads and computes batches of its own,
            which is faster than sharing each batch; for few, the first answer comes sooner.
    """

    def __init__(self, folder, num_images=1):
        self.folder = Path(folder)
        self.program = self._read(PROGRAM)
        self.outputs = self.program.get("outputs", ["logits"])  # missing in older folders
        self.labels = {int(index): name for index, name in self._read("labels.json").items()}
        self.preprocessing = self._read("preprocessing.json")
        self.thresholds = self._read("thresholds.json")
        self.jpeg_dct = self.preprocessing.get("jpeg_dct", "accurate")  # missing in older folders
        self.about: dict[str, str] = {}  # name and SHA-256 of the model, of a program in the cache
        self.streams = 1 if num_images <= _FEW_IMAGES else _count_cores()

    def _read(self, name):
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    @cached_property
    def run(self) -> Any:
        """Return the loaded program: name of an output, pixel values (batch, 3, height, width) -> (batch, ...).

        Several threads may call it. With one stream, each call uses all cores, else one core.
        """
        path = self.folder / self.program["file"]
        load = _load_onnx if path.suffix == ".onnx" else _load_openvino
        return load(path, self.outputs, self.streams)

    def pixel_values(self, image):
        """Return an image as the program's input, (1, 3, height, width).

        Args:
            image: a path, bytes, an open file, or {"bytes", "path"}.

        Raises:
            ImageReadingError: the image cannot be read.
        """
        levels = read_image(image, self.preprocessing["background"], self.jpeg_dct)
        if self.program["resizes"]:
            levels = levels.round().astype(np.uint8)
        else:
            levels = resize_and_crop(levels, self.preprocessing).astype(np.float32)
            if self.preprocessing.get("do_flip_channel_order"):
                levels = levels[..., ::-1]
        return np.ascontiguousarray(levels.transpose(2, 0, 1)[None])

    def logits(self, image):
        """Return the logits of an image, (classes,)."""
        return self.run("logits", self.pixel_values(image))[0]

    def scores(self, logits):
        """Return the scores of logits (..., classes): probabilities, or the values of a regression."""
        if self.program["scores"] == "softmax":
            exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
            return exponentials / exponentials.sum(axis=-1, keepdims=True)
        if self.program["scores"] == "sigmoid":
            return np.exp(-np.logaddexp(0, -logits))  # without overflow
        return logits

    def predict(self, images, batch_size=8, fetch=None, **rule) -> Iterator[Batch]:
        """Yield batches with the classes of images, a list of `Prediction` each.

        Args:
            images: sequence of images, as in `pixel_values`.
            batch_size: maximum number of images that are computed at once.
            fetch: function that is called with each image before it is read, in a thread.
            rule: `top_k`, `threshold`, `coverage` and `reject`, as in `ClassRule`.
        """
        is_regression = self.program["scores"] == "none"
        classes = ClassRule(self.labels, self.thresholds, is_regression=is_regression, **rule).classes

        def answer(logits):
            if not np.isfinite(logits).all():
                raise ValueError("cannot classify images: the model computes NaN or infinite logits")
            return classes(logits, self.scores(logits))

        return self._batches(images, batch_size, fetch, "logits", answer)

    def embed(self, images, batch_size=8, fetch=None, normalize=False) -> Iterator[Batch]:
        """Yield batches with the features of images, (images, features) each; arguments as in `predict`.

        Args:
            normalize: divide each feature vector by its length (L2).
        """

        def answer(features):
            if not np.isfinite(features).all():
                raise ValueError("the model computes NaN or infinite features")
            return unit_length(features) if normalize else features

        return self._batches(images, batch_size, fetch, "pooler_output", answer)

    def _batches(self, images, batch_size, fetch, output, answer) -> Iterator[Batch]:
        if output not in self.outputs:
            raise ValueError(f"the program in {self.folder} does not compute {output}; export the model again")
        self.run  # noqa: B018 - loads the program, before threads use it
        in_flight = max(self.streams, 2)  # with one stream, a thread reads the next batch while another computes
        pending: deque[Any] = deque()

        def compute(numbers):
            read, unreadable = self._read_images(images, numbers, fetch)
            outputs = []
            for pixel_values in _stacks(list(read.values())):
                outputs.append(self.run(output, pixel_values))
            return Batch(list(read), answer(np.concatenate(outputs)) if outputs else [], unreadable)

        with ThreadPoolExecutor(in_flight) as pool:
            try:
                for start in range(0, len(images), batch_size):
                    pending.append(pool.submit(compute, range(start, min(start + batch_size, len(images)))))
                    if len(pending) > in_flight:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def _read_images(self, images, numbers, fetch):
        """Return the pixel values of the readable images by number, and the errors of the others."""
        read = {}
        unreadable = {}
        for number in numbers:
            try:
                image = images[number]
                read[number] = self.pixel_values(image if fetch is None else fetch(image))
            except ImageReadingError as error:
                unreadable[number] = error
        return read, unreadable


def is_deployed(folder: str | os.PathLike) -> bool:
    """Return whether a path is a deployment folder.

    Raises:
        ValueError: it is one of an older format.
    """
    if not Path(folder, PROGRAM).is_file() and Path(folder, "preprocessing.json").is_file():
        raise ValueError(f"{folder} was exported by an older version of hf_vit; export the model again")
    return Path(folder, PROGRAM).is_file()


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load_onnx(path, outputs, streams):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # threads that wait leave cores to others
    if streams > 1:
        options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda output, pixel_values: session.run([output], {"pixel_values": pixel_values})[0]


@cache
def _openvino_core():
    """Return the OpenVINO of these programs, which lives until the process ends.

    Several that end in the order in which they began break the handling of signals (`program_model._openvino_core`).
    """
    import openvino

    return openvino.Core()


def _load_openvino(path, outputs, streams):
    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if streams > 1:
        settings |= {"NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": streams}
    compiled = _openvino_core().compile_model(path, "CPU", settings)
    requests = threading.local()  # a request computes one call at a time

    def run(output, pixel_values):
        if not hasattr(requests, "own"):
            requests.own = compiled.create_infer_request()
        requests.own.infer(pixel_values, share_inputs=True)
        return requests.own.get_output_tensor(outputs.index(output)).data.copy()

    return run


def _stacks(pixel_values: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield batches of images of one size; a program that resizes takes images of any size, one size at a time."""
    while pixel_values:
        count = 1
        while count < len(pixel_values) and pixel_values[count].shape == pixel_values[0].shape:
            count += 1
        yield np.concatenate(pixel_values[:count])
        pixel_values = pixel_values[count:]


def read_image(image, background, jpeg_dct):
    """Read an image file, upright; transparent parts show the background.

    Args:
        image: a path, bytes, an open file, or {"bytes", "path"}.
        background: red, green and blue.
        jpeg_dct: "fast" or "accurate", the cosine transform of JPEGs.

    Returns:
        Levels (height, width, 3), uint8; of images with more than 8 bits float32.

    Raises:
        ImageReadingError: the image cannot be read.
    """
    Image.MAX_IMAGE_PIXELS = None  # the limit of `open_image` is another
    name = name_image(image, 0)
    with convert_errors(name, Exception):  # for a damaged file, decoders raise OSError, SyntaxError, struct.error, ...
        if str(name).endswith(".npy"):
            raise ValueError("arrays are read with PyTorch only, by a model that is not exported")
        with open_source(image) as file, open_image(file) as opened:
            levels = to_levels(pixels_of(load_upright(opened, jpeg_dct=jpeg_dct)))
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


def resize_and_crop(levels, settings) -> Any:
    """Resize and crop levels (height, width, 3) as the image processor with the `settings` of preprocessing.json."""
    resample, output = settings["resample"], settings["resize_output"]
    height, width = levels.shape[:2]
    size = settings["size"]
    new_size: Any
    if "shortest_edge" in size:
        new_size = shortest_edge_size(height, width, size["shortest_edge"], truncate=output == "rounded")
    else:
        new_size = (size["height"], size["width"])
    rows, columns = (range(new) for new in new_size)
    if settings["do_center_crop"]:
        rounding = crop_rounding(settings["preset"], output)
        rows, columns = center_window(new_size, settings["crop_size"], rounding)
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
        old, new, part = axis
        pixels, weights = filter_weights(old, new, part, settings["resample"])
    taps = zip(pixels.T, weights.T.astype(np.float32), strict=True)
    return sum(levels[rows] * weight[:, None, None] for rows, weight in taps)


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
    folder = Path(folder)
    options = vars(make_parser(Classifier(folder).thresholds).parse_args())
    given = options.pop("images")
    status = 0
    paths = []
    for image in map(Path, given):
        try:
            paths += images_below(image) if image.is_dir() else [image]
        except (OSError, ValueError) as error:
            print(printable(str(error)), file=sys.stderr)
            status = 1
    classifier = Classifier(folder, len(paths))
    write = predictions_writer("text", sys.stdout, is_regression=classifier.program["scores"] == "none")
    for batch in classifier.predict(paths, **options):
        for number, classes in zip(batch.numbers, batch.outputs, strict=True):
            write(str(paths[number]), classes)
        for error in batch.unreadable.values():
            print(printable(str(error)), file=sys.stderr)
            status = 1
    return status
