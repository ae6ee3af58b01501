"""Image files of a folder, recognized by their names; nothing is read."""

from collections.abc import Iterator
from pathlib import Path

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".jp2", ".ppm", ".pgm"),
    ".npy",  # arrays
    *(".heic", ".heif"),  # read with pillow-heif; without it they are named as unreadable
)


def images_below(folder: Path) -> list[Path]:
    """Return the image files in a folder and its subfolders, sorted; links are followed, hidden names left out.

    Raises:
        ValueError: there are no image files.
        OSError: a folder cannot be read.
    """
    found = sorted(_images_in(folder, frozenset()))
    if not found:
        raise ValueError(f"{folder} holds no images (expected files that end in {', '.join(IMAGE_SUFFIXES)})")
    return found


def _images_in(folder: Path, above: frozenset[tuple[int, int]]) -> Iterator[Path]:
    """Yield the image files, in any order.

    Args:
        above: device and inode of the folders above, to which a link may lead back.
    """
    state = folder.stat()
    here = (state.st_dev, state.st_ino)
    if here in above:
        return
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.suffix.lower() in IMAGE_SUFFIXES and entry.is_file():
            yield entry
        elif entry.is_dir():
            yield from _images_in(entry, above | {here})
