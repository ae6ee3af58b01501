"""Image files of a folder, recognized by their names; nothing is read."""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath

from ..models.image_formats import IMAGE_FORMATS

logger = logging.getLogger(__name__)

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
    not_taken: Counter[str] = Counter()
    found = sorted(_images_in(folder, frozenset(), not_taken))
    if not found:
        raise ValueError(f"{folder} holds no images (expected files that end in {', '.join(IMAGE_SUFFIXES)})")
    name_not_taken(folder, not_taken)
    return found


def _images_in(folder: Path, above: frozenset[tuple[int, int]], not_taken: Counter[str]) -> Iterator[Path]:
    """Yield the image files, in any order.

    Args:
        above: device and inode of the folders above, to which a link may lead back.
        not_taken: number of other files by suffix, which is counted up.
    """
    state = folder.stat()
    here = (state.st_dev, state.st_ino)
    if here in above:
        return
    for entry in folder.iterdir():
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _images_in(entry, above | {here}, not_taken)
        elif entry.suffix.lower() in IMAGE_SUFFIXES and entry.is_file():
            yield entry
        elif not is_companion(entry.name):
            not_taken[entry.suffix.lower()] += 1
