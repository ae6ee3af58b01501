"""Example pictures of the page: two photographs, handwritten digits, or those of a folder."""

import shutil
from pathlib import Path

from ..files.image_files import images_below
from ..models.image_reading import ImageReadingError, read_image

MOST_EXAMPLES = 12
_SHOWN = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".avif")  # what browsers show
_DIGITS = 6
PHOTOGRAPHS = Path(__file__).with_name("photographs")
CREDITS = (
    "Photographs: [china](https://www.flickr.com/photos/danielbuechele/6061409035/) by danielbuechele, "
    "[flower](https://www.flickr.com/photos/vultilion/6056698931/) by vultilion, "
    "[CC BY 2.0](https://creativecommons.org/licenses/by/2.0/), scaled."
)


def copy_examples(source: Path, folder: Path) -> list[Path]:
    """Copy the first readable images of a folder, at most `MOST_EXAMPLES`; return their files.

    Formats that browsers do not show, such as TIFF, are left out.

    Raises:
        ValueError: no image can be read and shown.
    """
    found: list[Path] = []
    for file in images_below(source):
        if file.suffix.lower() not in _SHOWN:
            continue
        try:
            read_image(file)
        except ImageReadingError:
            continue
        found.append(folder / f"{len(found) + 1:02d}-{file.name}")
        shutil.copyfile(file, found[-1])
        if len(found) == MOST_EXAMPLES:
            break
    if not found:
        raise ValueError(f"none of the images in {source} can be read and shown (expected {', '.join(_SHOWN)})")
    return found


def write_digits(folder: Path) -> list[Path]:
    """Write held-out handwritten digits of scikit-learn, for a classifier of digits; return their files."""
    from ..data.sources import load_digits

    digits = load_digits()["test"][:_DIGITS]["image"]
    found = [folder / f"digit_{number}.png" for number in range(1, _DIGITS + 1)]
    for digit, file in zip(digits, found, strict=True):
        digit.resize((320, 320)).save(file)
    return found
