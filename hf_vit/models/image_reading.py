"""Reader of images of any type; the result is a tensor (channels, height, width) of levels.

Levels are pixel intensities from 0 to 255: uint8 for 8-bit images, and float32 with a precision of 16 bits for others:

| image type | level |
| --- | --- |
| uint8, Pillow's 8-bit modes | the value |
| bool, Pillow's "1" | 0 or 255 |
| uint16, Pillow's "I;16" | value / 257, so 65535 becomes 255 |
| other integers, Pillow's "I" | the value, which must be in [0, 255] |
| floating point, Pillow's "F" | value * 255; the value must be in [0, 1] (a difference by rounding is clipped) |

Files are decoded in `image_decoding`, which applies the depth, the sense and the transparent color that they state.

Images with channels other than color and alpha can be arrays, `.npy` files, TIFF files with one page per channel, or
{"channels": [image, ...]} with one image per channel.
"""

import io
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.utils import logging

from .image_decoding import (
    MAX_PIXELS,
    ImageReadingError,
    check_pixels,
    convert_errors,
    describe_range,
    is_unloaded_file,
    load_upright,
    open_image,
    open_source,
    pixels_of,
)

logger = logging.get_logger(__name__)

# Pillow warns about images above 89 million pixels, which some phones take; here, the limit is MAX_PIXELS.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

_NPY = b"\x93NUMPY"  # first bytes of an .npy file
# Values that leave [0, 1] by rounding are clipped: those of half precision by one step at 1.
_MAX_EXCESS = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


def list_images(images: Any, device: Any = None) -> list[Any]:
    """Return a flat list of images.

    Batches are split on the CPU, where single images are faster because they fit into its cache. On an accelerator,
    batches stay one tensor, and tensors of equal shape are stacked.

    Args:
        images: as in `HfViTImageProcessor.preprocess`.
        device: device of the resize; None: that of the images.
    """
    if isinstance(images, list | tuple):
        if any(isinstance(item, int | float) for item in images):
            raise ImageReadingError("the images are nested lists of numbers; pass numpy.asarray(image, dtype) instead")
        return _stack_equal([image for item in images for image in list_images(item, device)])
    is_batch = isinstance(images, np.ndarray | torch.Tensor) and images.ndim == 4
    on_cpu = torch.device(device or getattr(images, "device", "cpu")).type == "cpu"
    return list(images) if is_batch and on_cpu else [images]


def _stack_equal(images: list[Any]) -> list[Any]:
    """Return equal tensors on an accelerator as one, (images, channels, height, width); others are not changed."""
    if len(images) < 2 or not all(isinstance(image, torch.Tensor) and image.ndim == 3 for image in images):
        return images
    kinds = {(image.shape, image.dtype, image.device) for image in images}
    if len(kinds) > 1 or images[0].device.type == "cpu":
        return images
    return [torch.stack(images)]


def read_image(
    image: Any,
    num_channels: int | None = 3,
    background: tuple[int, ...] | list[int] = (255, 255, 255),
    input_data_format: str | None = None,
    keep_float: bool = False,
    reduce_to: Callable[[int, int], tuple[int, int]] | None = None,
    name: str = "the image",
    jpeg_dct: str = "accurate",
) -> torch.Tensor:
    """Read an image and convert it to levels.

    Args:
        image: a path, `data:` URI, bytes, open file, {"bytes", "path"} as in `datasets`, PIL image, NumPy array or
            tensor; an array can be a batch. Or {"channels": [image, ...]}, one image per channel.
        num_channels: number of channels of the result; None: that of the image.
        background: (red, green, blue), the background of transparent images.
        input_data_format: "channels_first" or "channels_last", for arrays of ambiguous shape.
        keep_float: do not convert or check the values of floating-point arrays.
        reduce_to: function that returns the size to which an image of (height, width) will be resized. A JPEG is
            decoded at 1/2, 1/4 or 1/8 of its size, if that is not smaller.
        name: name of the image, for messages.
        jpeg_dct: "fast" (as TensorFlow) or "accurate" (as Pillow), the cosine transform of JPEG files, and of PIL
            images that were opened from them and not decoded yet.

    Returns:
        (..., channels, height, width), uint8 or float32.

    Raises:
        ImageReadingError: the image cannot be read, or its channels cannot be converted to `num_channels`.
    """
    with convert_errors(name, ValueError, TypeError):
        if isinstance(image, dict) and "channels" in image:
            parts = enumerate(image["channels"])
            options: dict[str, Any] = {"keep_float": keep_float, "jpeg_dct": jpeg_dct}
            channels = [read_image(part, 1, name=f"channel {n} of {name}", **options) for n, part in parts]
            levels = _stack(channels)
        elif isinstance(image, torch.Tensor) and image.layout != torch.strided:
            raise TypeError("it is a sparse tensor (expected a dense one, image.to_dense())")
        elif isinstance(image, np.ndarray | torch.Tensor):
            levels = _array_to_levels(image, num_channels, input_data_format, keep_float)
        elif is_npy(image):
            levels = _array_to_levels(load_npy(image, name), num_channels, input_data_format, keep_float)
        elif num_channels not in (None, 1, 3) and (channels := _read_tiff_channels(image, num_channels, name)):
            levels = _stack([_array_to_levels(channel) for channel in channels])
        else:
            pixels = pixels_of(load_image(image, reduce_to, name, jpeg_dct))
            levels = _array_to_levels(pixels, data_format="channels_last")
        if 0 in levels.shape:
            raise ValueError(f"it is empty, with shape {tuple(getattr(image, 'shape', levels.shape))}")
        return levels if num_channels is None else _convert_channels(levels, num_channels, background)


def load_image(
    image: Any,
    reduce_to: Callable[[int, int], tuple[int, int]] | None = None,
    name: str = "the image",
    jpeg_dct: str = "accurate",
) -> Image.Image:
    """Load the first frame of an image file or PIL image, upright, in its own mode.

    Args:
        image, reduce_to, name, jpeg_dct: as in `read_image`.

    Raises:
        ImageReadingError: the image cannot be read.
    """
    if is_npy(image):
        shape = load_npy(image, name).shape
        raise ImageReadingError(
            f"{name} is an array of shape {shape}, not an image file: set num_channels (--num-channels) to its channels"
        )
    with open_any(image, name) as file:
        if file is not image and getattr(file, "is_animated", False) and file.format != "MPO":  # an MPO has a preview
            logger.warning_once(f"{file.format} images with several frames: only the first frame is used")
        if file is image:
            reduce_to = None
        return load_upright(file, reduce_to, jpeg_dct)


@contextmanager
def open_any(image: Any, name: str) -> Iterator[Image.Image]:
    """Open an image file or PIL image, and check its size; any error becomes an ImageReadingError."""
    # for damaged files, decoders raise OSError, SyntaxError, struct.error, ...
    with convert_errors(name, Exception), ExitStack() as files:
        if not isinstance(image, Image.Image):
            image = files.enter_context(open_image(files.enter_context(open_source(image))))
        elif image.format == "EPS":
            raise ValueError("EPS images are not supported, because Pillow starts a program to decode them")
        elif is_unloaded_file(image, "TIFF") or (is_unloaded_file(image, "PNG") and _is_read_again(image)):
            file: Any = image  # its tags, checksums or transparent color, which Pillow's pixels do not show
            files.callback(file.fp.seek, file.fp.tell())
            image = open_image(file.fp)
        check_pixels(image.width, image.height)
        yield image


def _is_read_again(image: Any) -> bool:
    """Return whether a PNG is read from its file again; one that Pillow opened by its path is closed by decoding it."""
    return isinstance(image.fp, io.BytesIO) or "transparency" in image.info


def is_npy(image: Any) -> bool:
    """Return whether an image is the content or the path of an .npy file."""
    if isinstance(image, dict):
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if isinstance(image, bytes):
        return image.startswith(_NPY)
    return isinstance(image, str | os.PathLike) and os.fspath(image).endswith(".npy")


def load_npy(image: Any, name: str) -> np.ndarray:
    with (
        convert_errors(name, Exception),
        open_source(image) as file,
    ):  # for a damaged file, np.load raises EOFError, SyntaxError, ...
        return np.load(file, allow_pickle=False)


def _read_tiff_channels(image: Any, num_channels: int, name: str) -> list[np.ndarray]:
    """Return the channels of a TIFF file, as `read_tiff_channels`; an empty list for other images."""
    if isinstance(image, Image.Image):
        return []
    from .image_tiff import read_tiff_channels  # rarely needed

    with convert_errors(name, Exception), open_source(image) as file:
        return read_tiff_channels(file, num_channels)


def _stack(channels: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate images of one channel, (1, height, width), to (channels, height, width)."""
    shapes = {tuple(channel.shape) for channel in channels}
    if len(shapes) != 1:
        raise ValueError(f"its channels have different sizes, {sorted(shapes)}")
    return torch.cat(channels)  # float32 if any of the channels is


def _array_to_levels(
    array: np.ndarray | torch.Tensor,
    num_channels: int | None = None,
    data_format: str | None = None,
    keep_float: bool = False,
) -> torch.Tensor:
    """Convert an array or tensor to levels (..., channels, height, width); the arguments are those of `read_image`."""
    values = math.prod(array.shape[-3:])  # a view can be larger than its memory
    if values > 4 * MAX_PIXELS:
        raise ValueError(f"it has shape {tuple(array.shape)}, {values:,} values; at most {4 * MAX_PIXELS:,} are read")
    tensor = array if isinstance(array, torch.Tensor) else _to_tensor(array)
    if tensor.ndim not in (2, 3, 4) or tensor.is_complex():
        found = f"it has shape {tuple(array.shape)} and dtype {array.dtype}"
        raise ValueError(f"{found} (expected 2, 3 or 4 dimensions, and bool, integer or floating point)")
    if tensor.ndim == 2:
        return _to_levels(tensor[None], keep_float)
    if (data_format or _infer_data_format(array, num_channels)) == "channels_last":
        tensor = tensor.movedim(-1, -3)
    return _to_levels(tensor, keep_float)


def _to_tensor(array: np.ndarray) -> torch.Tensor:
    """Convert an array to a tensor, which shares its memory if PyTorch supports that."""
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def _to_levels(tensor: torch.Tensor, keep_float: bool) -> torch.Tensor:
    """Convert values of any dtype to levels, see the table at the top of this file."""
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8) * 255
    if tensor.dtype == torch.uint16:
        return tensor.float() / 257
    if not tensor.is_floating_point():
        tensor = tensor.long()  # PyTorch has few operations for uint32 and uint64
        _check_range(tensor, 255, "expected integers in [0, 255], or the dtype uint16")
        return tensor.to(torch.uint8)
    if keep_float or tensor.element_size() == 1:  # PyTorch cannot compute with float8
        tensor = tensor.float()
    if keep_float:
        return tensor
    excess = _MAX_EXCESS.get(tensor.dtype, 1e-6)
    _check_range(tensor, 1, "expected floating-point values in [0, 1]; divide by 255, or pass uint8", excess)
    return (tensor.float().clamp(0, 1) * 65535).round() / 257  # 16 bits, so that k / 255 becomes exactly k


def _infer_data_format(array: np.ndarray | torch.Tensor, num_channels: int | None) -> str:
    """Return "channels_first" or "channels_last" for an array or tensor.

    If exactly one of the two axes has the length `num_channels`, it is the channel axis. Otherwise, it is an axis of
    this length or of length 1 to 4; if both are, it is the first axis of a tensor and the last axis of an array.
    """
    lengths = {"channels_first": array.shape[-3], "channels_last": array.shape[-1]}
    possible = [data_format for data_format, length in lengths.items() if length == num_channels]
    if len(possible) != 1:
        counts = (1, 2, 3, 4, num_channels)
        possible = [data_format for data_format, length in lengths.items() if length in counts]
    if possible:
        return possible[0 if isinstance(array, torch.Tensor) else -1]
    raise ValueError(f"it has shape {tuple(array.shape)}, without an axis of 1 to 4 channels; set input_data_format")


def _check_range(tensor: torch.Tensor, highest: int, expected: str, excess: float = 0) -> None:
    """Raise ValueError for values that are outside [0, highest] by more than `excess`."""
    low, high = (value.item() for value in tensor.aminmax()) if tensor.numel() else (0, 0)
    if not (low >= -excess and high <= highest + excess):  # also true for NaN
        raise ValueError(f"it has values from {describe_range(low, high)}; {expected}")


def _convert_channels(levels: torch.Tensor, num_channels: int, background: tuple[int, ...] | list[int]) -> torch.Tensor:
    """Convert levels to (..., num_channels, height, width): repeat gray, blend alpha with the background."""
    channels = levels.shape[-3]
    if channels == num_channels:
        return levels
    if channels == 1:
        return levels.expand(*levels.shape[:-3], num_channels, *levels.shape[-2:])
    if num_channels in (1, 3) and channels in (2, 3, 4):
        if channels == 2:
            levels = levels[..., [0, 0, 0, 1], :, :]
        color = levels if channels == 3 else composite(levels, background)
        return color if num_channels == 3 else _luma(color)
    raise ValueError(f"it has {channels} channels (expected {num_channels})")


def composite(levels: torch.Tensor, background: tuple[int, ...] | list[int]) -> torch.Tensor:
    """Blend RGBA levels (..., 4, height, width) with a background color; return (..., 3, height, width)."""
    color = levels[..., :3, :, :].float()
    alpha = levels[..., 3:, :, :].float()
    behind = torch.tensor(background, dtype=torch.float32, device=levels.device)[:, None, None]
    blended = (color * alpha + behind * (255 - alpha)) / 255
    return blended if levels.is_floating_point() else blended.round().to(torch.uint8)


def _luma(levels: torch.Tensor) -> torch.Tensor:
    """Convert RGB levels to gray (ITU-R 601 luma), in the fixed-point arithmetic of Pillow's `convert("L")`.

    Args:
        levels: (..., 3, height, width)

    Returns:
        (..., 1, height, width)
    """
    if levels.is_floating_point():
        weights = torch.tensor([0.299, 0.587, 0.114], device=levels.device)
        return (levels * weights[:, None, None]).sum(-3, keepdim=True)
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32, device=levels.device)
    return ((levels.int() * weights[:, None, None]).sum(-3, keepdim=True) + 0x8000 >> 16).to(torch.uint8)
