"""Images for other purposes than a model: their size, as 8-bit PIL images, and for display."""

from typing import Any

import torch
from PIL import Image

from ..models.image_decoding import upright_size
from ..models.image_reading import is_npy, load_image, load_npy, open_any, read_image


def read_for_display(image: Any, side: int, name: str = "the image") -> Image.Image:
    """Read an image file for display, in RGB.

    Of an .npy array, the first three channels are shown; if there are fewer, only the first one, as gray.

    Args:
        image, name: as in `read_image`.
        side: minimum height and width at which a JPEG is decoded, in pixels.

    Raises:
        ImageReadingError: the image cannot be read.
    """
    if not is_npy(image):
        return to_mode(load_image(image, lambda height, width: (side, side), name), "RGB", name=name)
    array = load_npy(image, name)
    layout = "channels_last" if array.shape[-1] < array.shape[0] else "channels_first"
    levels = read_image(array, None, input_data_format=layout, name=name)
    shown = levels[: 3 if len(levels) >= 3 else 1].round().to(torch.uint8)
    return Image.fromarray(shown.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy())


def read_size(image: Any, name: str = "the image") -> tuple[int, int]:
    """Return the upright (height, width) of an image file, without decoding it.

    Raises:
        ImageReadingError: the image cannot be read.
    """
    with open_any(image, name) as file:
        return upright_size(file)


def to_mode(
    image: Image.Image, mode: str, background: tuple[int, ...] | list[int] = (255, 255, 255), name: str = "the image"
) -> Image.Image:
    """Convert a PIL image to the mode "RGB" or "L", with the levels of `read_image` rounded to 8 bits.

    Raises:
        ImageReadingError: the image has integers above 16 bits, or floating-point values outside [0, 1].
    """
    if image.mode in ("RGB", "L") and "transparency" not in image.info:  # not through a tensor, which is slower
        return image if image.mode == mode else image.convert(mode)
    levels = read_image(image, {"RGB": 3, "L": 1}[mode], background, name=name).round().to(torch.uint8)
    pixels = levels[0] if mode == "L" else levels.permute(1, 2, 0)
    return Image.fromarray(pixels.numpy())
