"""Image files of a folder, recognised by their names; nothing is read."""

from pathlib import Path

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".jp2", ".ppm", ".pgm")


def images_below(folder: Path) -> list[Path]:
    """Return the image files in a folder and its subfolders, sorted.

    Raises:
        ValueError: there are no image files.
    """
    found = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    if not found:
        raise ValueError(f"{folder} holds no images (expected files that end in {', '.join(IMAGE_SUFFIXES)})")
    return found
