"""Image files of a folder, recognized by their names; nothing is read."""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath

logger = logging.getLogger(__name__)

# Formats, as in `FORMATS` of models/image_decoding.py, and their suffixes
IMAGE_FORMATS = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),  # Pillow opens .mpo, JPEGs with a preview, as a kind of JPEG
    "PNG": (".png", ".apng"),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "DIB": (".dib",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm", ".pfm"),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
    "JPEG2000": (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    "AVIF": (".avif", ".avifs"),
    "HEIF": (".heic", ".heics", ".heif", ".heifs", ".hif"),  # read with pillow-heif
}
# Of all commands; ".npy" are arrays.
IMAGE_SUFFIXES = (*(suffix for suffixes in IMAGE_FORMATS.values() for suffix in suffixes), ".npy")
# Files that belong to images, which are not named when they are not taken.
_COMPANIONS = {"labels.csv", "metadata.csv", "metadata.jsonl", "metadata.parquet", "thumbs.db", "desktop.ini"}
_COMPANION_STEMS = {"readme", "license", "licence", "credits"}


def is_companion(name: str) -> bool:
    """Return whether a file that is no image is expected beside images: hidden files, labels and descriptions."""
    path = PurePath(name.lower())
    return name.startswith(".") or path.name in _COMPANIONS or path.stem in _COMPANION_STEMS


def name_not_taken(folder: object, suffixes: dict[str, int]) -> None:
    """Print the number of files that were not taken of a folder, by suffix."""
    if suffixes:
        total = sum(suffixes.values())
        ordered = sorted(suffixes.items(), key=lambda item: (-item[1], item[0]))
        named = [f"{suffix or 'no suffix'} {count}" for suffix, count in ordered[:8]]
        more = ", ..." if len(ordered) > 8 else ""
        plural = "" if total == 1 else "s"
        logger.warning("%s: %d file%s not taken: %s%s", folder, total, plural, ", ".join(named), more)


def images_below(folder: Path) -> list[Path]:
    """Return the image files in a folder and its subfolders, sorted; links are followed, hidden names left out.

    The number of other files is printed on standard error, by suffix.

    Raises:
        ValueError: there are no image files.
        OSError: a folder cannot be read.
    """
    return [Path(os.fsdecode(name)) for name in iterate_images(folder)]


def iterate_images(folder: str | os.PathLike) -> Iterator[bytes]:
    """Yield the paths of `images_below`, as bytes; the names of one folder at a time are in memory."""
    not_taken: Counter[str] = Counter()
    found = _images_in(os.fsencode(folder), frozenset(), not_taken)
    first = next(found, None)
    if first is None:
        raise ValueError(f"{folder} holds no images (expected files that end in {', '.join(IMAGE_SUFFIXES)})")
    yield first
    yield from found
    name_not_taken(folder, not_taken)


def _images_in(folder: bytes, above: frozenset[tuple[int, int]], not_taken: Counter[str]) -> Iterator[bytes]:
    """Yield the image files, sorted.

    Args:
        above: device and inode of the folders above, to which a link may lead back.
        not_taken: number of other files by suffix, which is counted up.
    """
    state = os.stat(folder)
    here = (state.st_dev, state.st_ino)
    if here in above:
        return
    names = []
    folders = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(b"."):
                continue
            name = os.fsdecode(entry.name)
            suffix = PurePath(name).suffix.lower()
            if entry.is_dir():
                folders.add(entry.name)
                names.append(entry.name)
            elif suffix in IMAGE_SUFFIXES and entry.is_file():
                names.append(entry.name)
            elif not is_companion(name):
                not_taken[suffix] += 1
    names.sort()
    for name in names:
        path = os.path.join(folder, name)
        if name in folders:
            yield from _images_in(path, above | {here}, not_taken)
        else:
            yield path
