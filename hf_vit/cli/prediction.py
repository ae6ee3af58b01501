"""`hf-vit predict`."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..files.output import new_file, refuse_existing
from ..files.progress import silence_progress_bars
from .arguments import Commands, add_command, parse_size
from .image_list import SKIPPING, Reading, add_image_arguments, find_images, load_on

_FORMATS = {"": "text", ".txt": "text", ".csv": "csv", ".jsonl": "jsonl"}  # by the suffix of --output


def add_commands(commands: Commands) -> None:
    """Add `predict`."""
    command = add_command(commands, "predict", _predict, "classify images")
    command.epilog = SKIPPING
    command.add_argument("folder", help="model: a folder of save_pretrained, or a name on the Hub")
    add_image_arguments(command)
    command.add_argument(
        "--image-size", type=parse_size, metavar="N|HxW", help="image size in pixels (default: the model's own)"
    )
    command.add_argument("--preset", help="preset that resizes and crops the images (default: the model's own)")
    command.add_argument("--top-k", type=int, default=5, help="number of classes per image (default 5)")
    command.add_argument(
        "--format",
        choices=["text", "jsonl", "csv"],
        help="output format; jsonl: one JSON object per image; csv: one row per image and class (default: by the "
        "suffix of --output, .txt, .csv or .jsonl; else text)",
    )
    command.add_argument("--json", action="store_const", const="jsonl", dest="format", help="same as --format jsonl")
    command.add_argument("--output", type=Path, metavar="FILE", help="file to write, instead of standard output")
    command.add_argument("--overwrite", action="store_true", help="replace the output file")


def _predict(arguments: argparse.Namespace) -> None:
    if arguments.top_k < 1:
        raise ValueError(f"--top-k is {arguments.top_k}; it must be at least 1")
    suffix = arguments.output.suffix.lower() if arguments.output else ""
    if arguments.format is None and suffix not in _FORMATS:
        endings = ", ".join(filter(None, _FORMATS))
        raise ValueError(f"--output is {arguments.output} (expected a name that ends in {endings}, or --format)")
    if arguments.output:
        refuse_existing(arguments.output, arguments.overwrite)  # before the work, not after
    images = find_images(arguments)
    silence_progress_bars()
    from ..files.predictions import predictions_writer
    from ..models.configuration_hf_vision import score_function
    from ..prediction import classify_batches

    own = {"image_size": arguments.image_size, "preset": arguments.preset}
    model, processor = load_on(arguments.folder, arguments.device, arguments.backend, **own)
    batches = classify_batches(model, processor, images, arguments.top_k, arguments.batch_size, skip_unreadable=True)
    reading = Reading("hf-vit predict", images)
    with _opened(arguments.output, arguments.overwrite) as file:
        in_percent = score_function(model.config) != "none"
        write = predictions_writer(arguments.format or _FORMATS[suffix], file, in_percent)
        for names, found in reading.follow(batches):
            for name, predictions in zip(names, found, strict=True):
                write(name, predictions)
    reading.end()


@contextmanager
def _opened(path: Path | None, overwrite: bool) -> Iterator[TextIO]:
    """Open a file that appears at the end, complete; without a path, standard output."""
    if path is None:
        yield sys.stdout
        return
    with (
        new_file(path, overwrite) as draft,
        open(draft, "w", encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        yield file
