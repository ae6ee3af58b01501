"""The images that a command is given: files, folders, globs, addresses, parquet files and data sets."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NamedTuple

from ..files.image_files import images_below
from ..files.messages import one_sentence

_ADDRESSES = ("https://", "http://")  # reading an image says what is wrong with the second
_ROW = re.compile(r"(.+?):(\w+(?:\[[^]]*\])?):(\d+)")  # name:split:row
_INSTALL = "pip install 'hf_vit[training]'"
PLACES = (
    "files, folders (all images in them and below, sorted), globs in quotes, https:// addresses, or parquet files with "
    "a column of images"
)
SKIPPING = (
    "An image that cannot be read is named on standard error and left out; the exit status is then 1, or 2 if there is "
    "no other image."
)


class _Entry(NamedTuple):
    name: str
    rows: Any = None  # a data set of which it is one, and its number there
    number: int = 0


class ImageList(Sequence[Any]):
    """What an image processor takes for each image; rows of a data set are read when they are asked for."""

    def __init__(self, entries: list[_Entry]):
        self._entries = entries
        self.names = [entry.name for entry in entries]

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, place):
        name, rows, number = self._entries[place]
        if rows is None:
            return name
        (image,) = rows[number].values()
        return {"bytes": image["bytes"], "path": name} if image["bytes"] is not None else image["path"]


def add_image_arguments(command: argparse.ArgumentParser) -> None:
    """Add what says where images are, and how they are computed."""
    command.add_argument("images", nargs="*", help=PLACES)
    command.add_argument("--dataset", metavar="NAME", help="a data set: a name on the Hub, or a folder")
    command.add_argument("--split", help="of --dataset, such as test or train[:10%%] (default: its only one)")
    command.add_argument("--image-column", metavar="NAME", help="of --dataset or parquet files (default: the only one)")
    command.add_argument("--batch-size", type=int, default=8, help="images of a forward, at most (default 8)")
    command.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps, ... (default cpu)")
    command.add_argument(
        "--backend", choices=["auto", "torch", "openvino", "onnxruntime"], help="what computes (default: plain torch)"
    )


def find_images(arguments: argparse.Namespace) -> ImageList:
    """All images of the arguments of `add_image_arguments`, in the order of the command line, the data set last.

    Raises:
        FileNotFoundError: naming what there is not.
        ValueError: there are no images in a place, or no such split or column.
        ImportError: a data set or parquet file needs an extra.
    """
    entries: list[_Entry] = []
    missing: list[str] = []
    for place in arguments.images:
        if place.startswith(_ADDRESSES):
            entries.append(_Entry(place))
            continue
        paths = [Path(place).expanduser()]
        if not paths[0].exists():
            paths = [Path(found) for found in sorted(glob(str(paths[0]), recursive=True))] if has_magic(place) else []
        missing += [] if paths else [place]
        for path in paths:
            entries += _entries_at(path, arguments.image_column)
    if missing:
        raise FileNotFoundError(f"no such file: {', '.join(missing)}")
    if arguments.dataset:
        entries += _rows_of(arguments.dataset, arguments.split, arguments.image_column)
    elif arguments.split:
        raise ValueError("--split is of a data set, and there is no --dataset")
    if not entries:
        raise ValueError("there are no images: name files, folders or addresses of them, or a data set with --dataset")
    return ImageList(entries)


def _entries_at(path: Path, column: str | None) -> list[_Entry]:
    if path.suffix.lower() == ".parquet" and path.is_file():
        return _rows_of(str(path), None, column)
    if not path.is_dir():
        return [_Entry(str(path))]
    return [_Entry(str(file)) for file in images_below(path)]


def _rows_of(name: str, split: str | None, column: str | None) -> list[_Entry]:
    """The rows of one split, called name:split:row; the only split if none is said."""
    rows, split = _open_rows(name, split, column)
    return [_Entry(f"{name}:{split}:{number}", rows, number) for number in range(len(rows))]


def read_named(name: str) -> Any:
    """What reads the image of a name in `ImageList.names`: the name, but the image itself of a row of a data set."""
    found = None if name.startswith(_ADDRESSES) or Path(name).exists() else _ROW.fullmatch(name)
    if found is None:
        return name
    with suppress(ValueError, OSError, ImportError, IndexError):  # the data set may be another one by now
        return ImageList([_Entry(name, _open_rows(found[1], found[2], None)[0], int(found[3]))])[0]
    return name


def _open_rows(name: str, split: str | None, column: str | None) -> tuple[Any, str]:
    """The column of images of a split, undecoded, and the split's name."""
    try:
        from ..training.data import open_split
        from ..training.sources import load_split, names_of_splits
    except ImportError as error:
        raise ImportError(f"{name} needs {error.name or 'datasets'}, which is not installed: {_INSTALL}") from error
    if split is None:
        names = names_of_splits(name)
        if len(names) != 1:
            raise ValueError(f"{name} has several splits; choose with --split: {', '.join(names)}")
        split = names[0]
    samples = load_split(name, split)
    if isinstance(samples, list):
        raise ValueError(f"cannot read shards at an address: {name}; download them, or name a data set on the Hub")
    opened = open_split(samples, image_column=column, needs_labels=False)
    return opened.samples.select_columns(opened.image_column), split


class Reading:
    """Batches with a progress bar on a terminal; the images that cannot be read are named as they come.

    Args:
        program: what messages begin with.
        images: of the batches.
    """

    def __init__(self, program: str, images: ImageList):
        self._program, self._images, self._skipped = program, images, 0

    def follow(self, batches: Any) -> Iterator[tuple[list[str], Any]]:
        """Names of images and their outputs, batch after batch.

        Raises:
            ValueError: no image can be read.
        """
        from tqdm import tqdm

        with tqdm(total=len(self._images), unit=" images", disable=None, delay=1) as bar:
            for batch in batches:
                self._skipped += len(batch.unreadable)
                for error in batch.unreadable.values():
                    if len(self._images) == 1:
                        raise error
                    bar.write(f"{self._program}: {one_sentence(error)}", file=sys.stderr)
                if batch.numbers:
                    with bar.external_write_mode():
                        yield [self._images.names[number] for number in batch.numbers], batch.outputs
                bar.update(len(batch.numbers) + len(batch.unreadable))
        if self._skipped == len(self._images):
            raise ValueError(f"none of the {self._skipped} images can be read")

    def end(self) -> None:
        """Say how many images were left out, if any, and end with the exit status 1."""
        if self._skipped:
            left = f"{self._skipped} of {len(self._images)} images cannot be read and"
            print(f"{self._program}: {left} {'is' if self._skipped == 1 else 'are'} left out", file=sys.stderr)
            raise SystemExit(1)


def load_on(folder: str, device: str, backend: str | None = None, encoder_alone: bool = False) -> tuple[Any, Any]:
    """Load a model onto a device, and its image processor.

    Args:
        encoder_alone: the backend computes the model's encoder, not what a head makes of it.

    Raises:
        ValueError: there is no such device, or the backend does not compute there.
    """
    import torch

    from ..models.loading import load

    if backend not in (None, "torch") and device != "cpu":
        raise ValueError(f"--backend {backend} computes on the CPU, and --device is {device}; leave one out")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"--device {device} is not there: {reason}; `hf-vit env` lists the devices") from error
    if device == "cpu" and not encoder_alone:
        return load(folder, backend=backend)
    model, processor = load(folder)
    model.to(device)  # pyright: ignore[reportArgumentType] - a decorator of transformers hides its type
    if backend is not None:
        part: Any = model.base_model if encoder_alone else model
        part.optimize_for_inference(backend=backend)
    return model, processor
