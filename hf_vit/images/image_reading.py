"""Whatever a user calls an image becomes a tensor (channels, height, width) of levels from 0 to 255.

Levels are uint8 where the source has 8 bits, and float32 with 16 bits of precision where it has more:

| source | level |
| --- | --- |
| uint8, Pillow's 8-bit modes | the value |
| bool, Pillow's "1" | 0 or 255 |
| uint16, Pillow's "I;16" and "I" | value / 257, so 65535 becomes 255 |
| other integers | the value, which must be in [0, 255] |
| floating point, Pillow's "F" | value * 255, which must come from [0, 1] |
"""

import base64
import io
import math
import os
import queue
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np
import torch
from huggingface_hub.utils import get_session
from PIL import Image, ImageOps
from transformers.utils import logging

logger = logging.get_logger(__name__)

_ORIENTATION = 0x0112  # the EXIF tag
# What is read at most, on what an image declares. The largest photographs have some 100 million pixels.
_MAX_PIXELS = 2**27
_BLOCK = 2**20  # bytes that are read at once
_MAX_NESTING = 16  # lists of images inside each other
_MAX_DOWNLOAD_BYTES = 2**26  # of an image behind an address
_DOWNLOAD_SECONDS = 60.0  # for all of it
_SILENCE_SECONDS = 15.0  # without an answer or a byte of it
_MAX_REDIRECTS = 5
_EIGHT_BIT_MODES = {"1": "L", "L": "L", "LA": "LA", "La": "LA", "PA": "RGBA", "RGBA": "RGBA", "RGBa": "RGBA"}
_DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
_CHANNEL_COUNTS = (1, 2, 3, 4)  # lengths of a channel axis of an array, besides the number of channels asked for


class ImageReadingError(ValueError):
    """An image that cannot be read; the message names the file, or the place in the batch."""


def allowed(what: str) -> bool:
    """Whether the environment variable `HF_VIT_ALLOW`, a list with commas, lifts limits of a kind.

    Args:
        what: "large" (images beyond a limit), "http" (addresses without encryption) or "private" (addresses of the
            machine itself and of private networks).
    """
    return what in os.environ.get("HF_VIT_ALLOW", "").replace(" ", "").split(",")


def list_images(images: Any, device: Any = None, depth: int = 0) -> list[Any]:
    """A flat list of images. A batch in one tensor on an accelerator stays whole, since there few large steps are
    faster; on the CPU many small ones are, that stay in its cache.

    Raises:
        ValueError: lists are too deep inside each other.
    """
    if isinstance(images, list | tuple):
        if depth > _MAX_NESTING:
            raise ValueError(f"lists of images are inside each other more than {_MAX_NESTING} deep")
        images = [image for item in images for image in list_images(item, device, depth + 1)]
        return [torch.stack(images)] if _can_stack(images) else images
    if isinstance(images, torch.Tensor) and _layout_of(images) != "dense":
        return [images]
    if isinstance(images, np.ndarray | torch.Tensor) and images.ndim == 4:
        on_cpu = torch.device(device or getattr(images, "device", "cpu")).type == "cpu"
        return list(images) if on_cpu else [images]
    return [images]


def count_images(images: list[Any]) -> int:
    """How many images a list has in which batches count with all of theirs."""
    return sum(len(image) if isinstance(image, torch.Tensor) and image.ndim == 4 else 1 for image in images)


def _can_stack(images: list[Any]) -> bool:
    """Whether these are equal images on one accelerator."""
    tensors = (isinstance(image, torch.Tensor) and image.ndim == 3 and _layout_of(image) == "dense" for image in images)
    if len(images) < 2 or not all(tensors):
        return False
    kinds = {(image.shape, image.dtype, image.device) for image in images}
    return len(kinds) == 1 and images[0].device.type != "cpu"


def name_image(image: Any, index: int) -> str:
    """How messages call an image: by its file if it has one, else by its place."""
    path = image.get("path") if isinstance(image, dict) else getattr(image, "filename", image)
    if isinstance(path, str | os.PathLike) and str(path):
        return str(path) if len(str(path)) <= 200 else f"image {index} ({str(path)[:50]}...)"
    return f"image {index}"


def read_image(
    image: Any,
    num_channels: int | None = 3,
    background: tuple[int, ...] | list[int] = (255, 255, 255),
    input_data_format: str | None = None,
    keep_float: bool = False,
    reduce_to: Callable[[int, int], tuple[int, int]] | None = None,
    name: str = "the image",
) -> torch.Tensor:
    """Levels of an image.

    Args:
        image: a path, URL, `data:` URI, bytes, open file, {"bytes", "path"} of `datasets`, PIL image, NumPy array or
            tensor; arrays may be a batch.
        num_channels: how many channels the result has; None leaves them as they come.
        background: what shows through where an image is transparent.
        input_data_format: "channels_first" or "channels_last", for arrays whose shape does not tell.
        keep_float: floating-point arrays are taken as they are, whatever their range.
        reduce_to: for a height and width, the (height, width) that such an image will be resized to; a JPEG is then
            decoded at 1/2, 1/4 or 1/8 of its size if that is at least as large.
        name: how messages name the image.

    Returns:
        (..., channels, height, width), uint8 or float32.

    Raises:
        ImageReadingError: what cannot be read, is not an image, or has other channels than asked for.
    """
    if isinstance(image, np.ndarray | torch.Tensor):
        levels = _levels_of_array(image, num_channels, input_data_format, keep_float, name)
    else:
        levels = _levels_of_array(decode(image, reduce_to, name), None, "channels_last", False, name)
    if 0 in levels.shape:
        raise ImageReadingError(f"{name} is empty: its shape is {tuple(getattr(image, 'shape', levels.shape))}")
    return levels if num_channels is None else _convert_channels(levels, num_channels, background, name)


def decode(image: Any, reduce_to: Callable[[int, int], tuple[int, int]] | None, name: str) -> np.ndarray:
    """Pixels of an image file, or PIL image, upright: (height, width) or (height, width, channels)."""
    try:
        if isinstance(image, Image.Image):
            _check_pixels(image.width, image.height)
            _check_png(image)
            return _pixels_of_pillow(image)
        with _open_source(image) as source, Image.open(source) as file:
            _check_pixels(file.width, file.height)
            _check_png(file)
            if getattr(file, "is_animated", False) and file.format != "MPO":  # MPO: a photograph and its preview
                logger.warning_once(f"{file.format} images with several frames: the first frame is used")
            if reduce_to is not None:
                height, width = reduce_to(*turn(file.size, file)[::-1])
                file.draft(None, turn((width, height), file))
            return _pixels_of_pillow(file)
    except Image.UnidentifiedImageError as error:
        raise ImageReadingError(f"{name} is not an image in a format that Pillow reads") from error
    except Exception as error:  # decoders of damaged files raise anything: OSError, SyntaxError, struct.error, ...
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ImageReadingError(f"{name} cannot be read: {reason}") from error


def _check_pixels(width: int, height: int) -> None:
    """Raise ValueError where an image declares more pixels than are read."""
    if width * height > _MAX_PIXELS and not allowed("large"):
        raise ValueError(f"it has {width} x {height}; at most {_MAX_PIXELS:,} are read (HF_VIT_ALLOW=large reads more)")


def _check_png(image: Image.Image) -> None:
    """Compare the chunks of a PNG that is not loaded yet with their checksums; Pillow skips those of the pixels."""
    file = getattr(image, "fp", None)
    if image.format != "PNG" or file is None:
        return
    place = file.tell()
    file.seek(8)  # after the signature
    kind = b""
    while kind != b"IEND" and len(beginning := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", beginning)
        checksum = zlib.crc32(kind)
        while length and (block := file.read(min(length, _BLOCK))):
            checksum, length = zlib.crc32(block, checksum), length - len(block)
        if len(stated := file.read(4)) == 4 and int.from_bytes(stated, "big") != checksum:
            raise OSError(f"the checksum of its {kind.decode('latin-1')} is wrong")
    file.seek(place)


class _File(io.FileIO):
    """A file of which nobody reads more than it has: Python takes the memory that a damaged header asks for."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(-1 if size is None else min(size, os.fstat(self.fileno()).st_size))


def _open_source(image: Any) -> AbstractContextManager[Any]:
    """What `PIL.Image.open` takes: an open file; one that was opened here is closed at the end of the block."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes | bytearray | memoryview):
        return io.BytesIO(image)
    if isinstance(image, str) and image.startswith(("http://", "https://")):
        return io.BytesIO(_download(image))
    if isinstance(image, str) and image.startswith("data:"):
        return io.BytesIO(base64.b64decode(image.partition(",")[2]))
    if isinstance(image, str | os.PathLike):
        path = Path(image)
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
            raise ValueError("it is not a regular file")
        return _File(str(path))
    if hasattr(image, "read"):
        return nullcontext(image)
    raise TypeError(f"expected a path, URL, bytes, PIL image, NumPy array or tensor, got {type(image).__name__}")


def _download(url: str) -> bytes:
    """The image behind an address, in another thread: no timeout holds for a name's look-up or headers that trickle.

    Raises:
        ValueError: it is too large, takes too long, or may not be asked for.
        httpx.RequestError: it cannot be reached.
    """
    answers: queue.SimpleQueue[tuple[bytes, BaseException | None]] = queue.SimpleQueue()
    end = time.monotonic() + _DOWNLOAD_SECONDS

    def receive() -> None:
        try:
            answers.put((_receive(url, end), None))
        except BaseException as error:
            answers.put((b"", error))

    threading.Thread(target=receive, daemon=True).start()
    try:
        body, error = answers.get(timeout=_DOWNLOAD_SECONDS)
    except queue.Empty:
        body, error = b"", ValueError(f"it did not come within {_DOWNLOAD_SECONDS:g} seconds")
    if error is not None:
        raise error
    return body


def _receive(url: str, end: float) -> bytes:
    """The body behind an address.

    Args:
        end: when to give up, in seconds of `time.monotonic`.
    """
    body = io.BytesIO()
    with _open_address(url, _SILENCE_SECONDS, {"Accept-Encoding": "identity"}) as response:
        if response.status_code != 200:
            raise ValueError(f"the server answers HTTP {response.status_code} {response.reason_phrase}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise ValueError("the server compresses it although it was asked not to")
        length = response.headers.get("Content-Length", "")
        _check_length(int(length) if length.isdecimal() else 0)
        for chunk in response.iter_raw():
            body.write(chunk)
            _check_length(body.tell())
            if time.monotonic() > end:
                raise ValueError(f"it did not come within {_DOWNLOAD_SECONDS:g} seconds")
    return body.getvalue()


def _check_length(length: int) -> None:
    if length > _MAX_DOWNLOAD_BYTES and not allowed("large"):
        limit = f"at most {_MAX_DOWNLOAD_BYTES:,} are downloaded (HF_VIT_ALLOW=large downloads more)"
        raise ValueError(f"it has {length:,} bytes or more; {limit}")


# Which addresses are asked. The same text is in files/download.py, which stays behind when this file travels.


class _AddressError(ValueError):
    """An address that is not asked, in one sentence."""


@contextmanager
def _open_address(url: str, timeout: float, headers: Mapping[str, str]) -> Iterator[Any]:
    """Ask for an encrypted address of a public machine; each redirect is held to the same.

    Both the machines of a name, before it is asked, and the one that a connection leads to, before anything is sent.

    Args:
        timeout: seconds without an answer or a byte.

    Yields:
        The response of httpx; its body is yet to come.

    Raises:
        _AddressError: an address is not encrypted or not public, and `HF_VIT_ALLOW` does not allow it.
        httpx.RequestError: it cannot be reached.
    """
    for _ in range(_MAX_REDIRECTS + 1):
        _check_address(url)
        watch: dict[str, Any] = {"trace": partial(_check_connection, url)}
        request: dict[str, Any] = {"headers": headers, "timeout": timeout, "extensions": watch}
        with get_session().stream("GET", url, follow_redirects=False, **request) as response:
            if response.next_request is None:
                yield response
                return
            url = str(response.next_request.url)
    raise _AddressError(f"{_bare(url)} is one of more than {_MAX_REDIRECTS} redirects")


def _check_address(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "http" and not allowed("http"):
        raise _AddressError(f"{_bare(url)} is not encrypted: use https://, or set HF_VIT_ALLOW=http")
    if parts.scheme not in ("http", "https"):
        raise _AddressError(f"{_bare(url)} begins with {parts.scheme[:20]}: (expected https://)")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise _AddressError(f"{_bare(url)} names no machine")
    try:
        found = [] if allowed("private") else socket.getaddrinfo(host, port or 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # left to whoever connects: a proxy may know the name
    for *_, address in found:
        _refuse_private(url, str(address[0]))


def _check_connection(url: str, event: str, about: Mapping[str, Any]) -> None:
    """Check where a new connection leads, since a name may have led elsewhere a moment ago; a proxy is the user's."""
    if event != "connection.connect_tcp.complete" or allowed("private"):
        return
    parts, proxies = urlsplit(url), getproxies()
    if (proxies.get(parts.scheme) or proxies.get("all")) and not proxy_bypass(parts.hostname or ""):
        return
    try:
        _refuse_private(url, about["return_value"].get_extra_info("server_addr")[0])
    except _AddressError:
        about["return_value"].close()
        raise


def _refuse_private(url: str, address: str) -> None:
    if not _is_public(ip_address(address)):
        raise _AddressError(f"{_bare(url)} leads to {address}, which is not public; HF_VIT_ALLOW=private allows it")


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour
        if int(address) >> 32 == 0x0064FF9B << 64:  # 64:ff9b::/96, NAT64's (RFC 6052)
            embedded = IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return _is_public(embedded)
    return address.is_global and not address.is_multicast


def _bare(url: str) -> str:
    """An address for messages: without names, keys and signatures, and not longer than a line."""
    parts = urlsplit(url)
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return bare if len(bare) <= 200 else f"{bare[:200]}..."


def _pixels_of_pillow(image: Image.Image) -> np.ndarray:
    """Pixels of a PIL image, upright, in a mode that `_levels_of_array` and `_convert_channels` know."""
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode in _DEEP_MODES:
        pixels = np.array(image)
        return pixels if image.mode == "F" else _sixteen_bits(pixels)
    mode = "RGBA" if "transparency" in image.info else _EIGHT_BIT_MODES.get(image.mode, "RGB")
    return np.array(image if image.mode == mode else image.convert(mode))


def _sixteen_bits(pixels: np.ndarray) -> np.ndarray:
    if pixels.min() < 0 or pixels.max() > 65535:
        raise ValueError(f"its integers go from {pixels.min()} to {pixels.max()}, expected 16 bits (0 to 65535)")
    return pixels.astype(np.uint16)


def turn(size: tuple[int, int], image: Image.Image) -> tuple[int, int]:
    """(width, height) in the file -> upright, or the other way round."""
    return size if image.getexif().get(_ORIENTATION, 1) < 5 else (size[1], size[0])


def _levels_of_array(
    array: np.ndarray | torch.Tensor, num_channels: int | None, data_format: str | None, keep_float: bool, name: str
) -> torch.Tensor:
    """Levels (..., channels, height, width) of an array or tensor."""
    if isinstance(array, torch.Tensor) and (layout := _layout_of(array)) != "dense":
        raise ImageReadingError(f"{name} is a {layout} tensor (expected a dense one)")
    if array.dtype.is_complex if isinstance(array, torch.Tensor) else array.dtype.kind not in "biuf":
        raise ImageReadingError(f"{name} has dtype {array.dtype}, which is no image")
    if array.ndim not in (2, 3, 4):
        raise ImageReadingError(f"{name} has {array.ndim} dimensions (shape {tuple(array.shape)}), expected 2, 3 or 4")
    if (values := math.prod(array.shape[-3:])) > 4 * _MAX_PIXELS and not allowed("large"):  # a view may declare any
        limit = f"at most {4 * _MAX_PIXELS:,} are read (HF_VIT_ALLOW=large reads more)"
        raise ImageReadingError(f"{name} has shape {tuple(array.shape)}, {values:,} values; {limit}")
    tensor = array if isinstance(array, torch.Tensor) else _tensor_of(array)
    if tensor.ndim == 2:
        return _to_levels(tensor[None], keep_float, name)
    if (data_format or _infer_data_format(array, num_channels, name)) == "channels_last":
        tensor = tensor.movedim(-1, -3)
    return _to_levels(tensor, keep_float, name)


def _layout_of(tensor: torch.Tensor) -> str:
    """Say "dense" of a tensor that has a number for each place, and of any other what it is."""
    kinds = {"nested": tensor.is_nested, "quantized": tensor.is_quantized, "meta": tensor.is_meta}
    sparse = tensor.layout is not torch.strided
    return next((kind for kind, is_one in {**kinds, "sparse": sparse}.items() if is_one), "dense")


def _tensor_of(array: np.ndarray) -> torch.Tensor:
    """The array's memory where PyTorch can use it, else a copy."""
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if usable else array.copy())


def _to_levels(tensor: torch.Tensor, keep_float: bool, name: str) -> torch.Tensor:
    """Values of any type -> levels, by the table at the top."""
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8) * 255
    if tensor.dtype == torch.uint16:
        return tensor.float() / 257
    if not tensor.is_floating_point():
        tensor = tensor.long()  # PyTorch does little with the longer unsigned integers
        _check_range(tensor, 255, "integer images are in [0, 255] (or uint16)", name)
        return tensor.to(torch.uint8)
    if keep_float or tensor.element_size() == 1:  # of float8, PyTorch computes nothing
        tensor = tensor.float()
    if keep_float:
        return tensor
    _check_range(tensor, 1, "floating-point images are in [0, 1] (divide by 255, or pass uint8)", name)
    return (tensor.float() * 65535).round() / 257  # 16 bits, so that k / 255 becomes exactly k


def _infer_data_format(array: np.ndarray | torch.Tensor, num_channels: int | None, name: str) -> str:
    """Where the channels are: the axis that has `num_channels`, and if both or none have, the custom of the library."""
    first, last = array.shape[-3], array.shape[-1]
    if (first == num_channels) != (last == num_channels):
        return "channels_first" if first == num_channels else "channels_last"
    candidates = {"channels_last": last, "channels_first": first}
    if isinstance(array, torch.Tensor):
        candidates = {"channels_first": first, "channels_last": last}
    for data_format, length in candidates.items():
        if length in _CHANNEL_COUNTS or length == num_channels:
            return data_format
    raise ImageReadingError(
        f"{name} has shape {tuple(array.shape)}, of which neither the first nor the last axis can be the channels; "
        'say input_data_format="channels_first" or "channels_last"'
    )


def _check_range(tensor: torch.Tensor, highest: int, expected: str, name: str):
    low, high = (value.item() for value in tensor.aminmax()) if tensor.numel() else (0, 0)
    if not (low >= 0 and high <= highest):  # also true for NaN
        raise ImageReadingError(f"{name} has values from {low:g} to {high:g}; {expected}")


def _convert_channels(
    levels: torch.Tensor, num_channels: int, background: tuple[int, ...] | list[int], name: str
) -> torch.Tensor:
    """(..., channels, height, width) -> (..., num_channels, height, width): grey repeated, alpha composited."""
    channels = levels.shape[-3]
    if channels == num_channels:
        return levels
    if channels == 1:
        return levels.expand(*levels.shape[:-3], num_channels, *levels.shape[-2:])
    if num_channels in (1, 3) and channels in (2, 3, 4):
        if channels == 2:
            levels = levels[..., [0, 0, 0, 1], :, :]
        colour = levels if channels == 3 else composite(levels, background)
        return colour if num_channels == 3 else _luma(colour)
    raise ImageReadingError(f"{name} has {channels} channels, expected {num_channels}")


def composite(levels: torch.Tensor, background: tuple[int, ...] | list[int]) -> torch.Tensor:
    """Lay (..., red green blue alpha, height, width) over a colour: (..., red green blue, height, width)."""
    colour, alpha = levels[..., :3, :, :].float(), levels[..., 3:, :, :].float()
    behind = torch.tensor(background, dtype=torch.float32, device=levels.device)[:, None, None]
    blended = (colour * alpha + behind * (255 - alpha)) / 255
    return blended if levels.is_floating_point() else blended.round().to(torch.uint8)


def _luma(levels: torch.Tensor) -> torch.Tensor:
    """ITU-R 601 brightness, in the fixed-point arithmetic of Pillow's `convert("L")`."""
    if levels.is_floating_point():
        weights = torch.tensor([0.299, 0.587, 0.114], device=levels.device)
        return (levels * weights[:, None, None]).sum(-3, keepdim=True)
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32, device=levels.device)
    return ((levels.int() * weights[:, None, None]).sum(-3, keepdim=True) + 0x8000 >> 16).to(torch.uint8)
