"""Reader for the `.msgpack` files of `flax.serialization.to_bytes`, one array at a time; nothing is unpickled.

The file is a tree of maps. An array is an extension of type 1: a packed (shape, name of the dtype, bytes). An array
above 1 GiB is a map of such arrays, which are concatenated.
"""

import math
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..models.utils import MAX_DEPTH, allowed
from .limits import HOW_TO_ALLOW, MAX_ARRAYS, MAX_CHECKPOINT_BYTES
from .messages import shorten
from .npz import BFLOAT16, SUPPORTED_DTYPES, ArrayInfo, as_tensor

# The beginning of a map whose first key is printable; excludes the beginning of a .safetensors file (length, then "{").
_BEGINNING = re.compile(rb"(?!...\0{5}{)(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.)[!-~]", re.DOTALL)
_MAPS = (*range(0x80, 0x90), 0xDE, 0xDF)  # first bytes of maps
_ARRAY = 1  # flax's _MsgpackExtType.ndarray
_CHUNKED = "/__msgpack_chunked_array__"
_MAX_DIMENSIONS, _MAX_NAME = 32, 4096  # NumPy 1's limit; bytes of one part of a name


class MsgpackError(ValueError):
    """A fault of a `.msgpack` file; the message names the file."""


class _Array(NamedTuple):
    """Description of an array in an extension, without the data, which are the extension's last bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int


def is_msgpack(path: Path) -> bool:
    """Return whether a file begins with a map that has a name, or is called `.msgpack` (it may be damaged)."""
    with open(path, "rb") as file:
        return _BEGINNING.match(file.read(16)) is not None or path.suffix == ".msgpack"


class MsgpackReader:
    """Reader of a `.msgpack` file, one array at a time; a context manager.

    Opening the file reads it once, with one array in memory at a time. Leaves that are not arrays (a step's number) are
    ignored.

    Attributes:
        arrays: name -> description of each array, in the order of the file. A name is the path of keys from the root,
            joined by slashes.

    Raises:
        MsgpackError: the file is damaged, holds no arrays, or exceeds a limit.
        ImportError: msgpack is not installed.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            import msgpack
        except ImportError as error:
            raise ImportError(f"{path} needs msgpack: pip install 'hf_vit[jax-checkpoints]'") from error
        self.path = Path(path)
        self.arrays: dict[str, ArrayInfo] = {}
        self._parts: dict[str, list[tuple[int, int]]] = {}  # (begin, end) of each array's bytes in the file
        self._numbers: dict[str, int] = {}  # integer leaves
        if (size := self.path.stat().st_size) > MAX_CHECKPOINT_BYTES and not allowed("large"):
            raise MsgpackError(f"{path} has {size:,} bytes; at most {MAX_CHECKPOINT_BYTES:,} {HOW_TO_ALLOW}")
        with open(self.path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            unpacker = msgpack.Unpacker(
                file,
                ext_hook=_read_extension,
                max_buffer_size=size + 1,
                max_str_len=_MAX_NAME,
                max_array_len=0,  # flax writes lists as maps
                max_map_len=MAX_ARRAYS,
            )
            try:
                self._walk(unpacker)
                self._join_chunks()
            except (ValueError, TypeError, msgpack.UnpackException) as error:  # msgpack's errors for damaged bytes
                reason = str(error) or type(error).__name__
                raise MsgpackError(f"{path} is damaged, or no tree of arrays in msgpack: {reason}") from error
        if not self.arrays:
            raise MsgpackError(f"{path} holds no arrays")

    def __enter__(self) -> "MsgpackReader":
        return self

    def __exit__(self, *exception: object) -> None:
        if isinstance(self._bytes, mmap.mmap):
            self._bytes.close()

    def read(self, name: str) -> torch.Tensor:
        """Read one array into its own memory."""
        buffer = np.empty(self.arrays[name].nbytes, np.uint8)
        position = 0
        for start, end in self._parts[name]:
            buffer[position : position + end - start] = np.frombuffer(self._bytes, np.uint8, end - start, start)
            position += end - start
        return as_tensor(buffer, self.arrays[name])

    def _walk(self, unpacker: Any, path: tuple[str, ...] = ()) -> None:
        """Record the kind and the position of every leaf of a map."""
        if len(path) > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        for _ in range(unpacker.read_map_header()):
            if not isinstance(key := unpacker.unpack(), str):
                raise ValueError(f"a key is {shorten(key)} (expected a name)")
            below = (*path, key)
            name = "/".join(below)
            if len(self.arrays) + len(self._numbers) > MAX_ARRAYS:
                raise ValueError(f"it has more than {MAX_ARRAYS:,} leaves")
            if unpacker.tell() == len(self._bytes):
                raise ValueError(f"it ends after the name {name!r}")
            if self._bytes[unpacker.tell()] in _MAPS:
                self._walk(unpacker, below)
            elif isinstance(value := unpacker.unpack(), _Array):
                if name in self.arrays:
                    raise ValueError(f"it holds two arrays named {name!r}")
                self.arrays[name] = ArrayInfo(name, *value)
                self._parts[name] = [(unpacker.tell() - value.nbytes, unpacker.tell())]
            elif isinstance(value, int):
                self._numbers[name] = value
        if not path and unpacker.tell() != len(self._bytes):
            raise ValueError(f"{len(self._bytes) - unpacker.tell()} bytes follow its end")

    def _join_chunks(self) -> None:
        """Join the chunks of arrays that are stored in chunks (flax's `_chunk`)."""
        for name in [name.removesuffix(_CHUNKED) for name in self._numbers if name.endswith(_CHUNKED)]:
            shape = _as_shape(_numbered(self._numbers, f"{name}/shape/"))
            chunks = _numbered(self.arrays, f"{name}/chunks/")
            for chunk in chunks:
                del self.arrays[chunk.name]
            dtypes, nbytes = {chunk.dtype for chunk in chunks}, sum(chunk.nbytes for chunk in chunks)
            if len(dtypes) != 1 or math.prod(shape) * chunks[0].dtype.itemsize != nbytes:
                raise ValueError(f"{name} has shape {shape}, but its chunks have {nbytes:,} bytes")
            self.arrays[name] = ArrayInfo(name, shape, chunks[0].dtype, nbytes)
            self._parts[name] = [part for chunk in chunks for part in self._parts.pop(chunk.name)]


def _as_shape(sizes: Iterable[Any]) -> tuple[int, ...]:
    shape = tuple(int(size) for size in sizes)
    if min(shape, default=0) < 0:
        raise ValueError(f"an array claims the shape {shape}")
    return shape


def _numbered(leaves: dict[str, Any], prefix: str) -> list[Any]:
    """Return the leaves `prefix + "0"`, `prefix + "1"` and so on."""
    found = []
    while (name := f"{prefix}{len(found)}") in leaves:
        found.append(leaves[name])
    return found


def _read_extension(kind: int, content: bytes) -> _Array | None:
    """Return the description of an extension's array; None for a number."""
    import msgpack

    if kind != _ARRAY:
        return None
    shape, dtype_name, data = msgpack.unpackb(content, max_array_len=_MAX_DIMENSIONS, max_map_len=0)
    dtype = BFLOAT16 if dtype_name == "bfloat16" else np.dtype(str(dtype_name))
    shape = _as_shape(shape)
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"an array has the unsupported dtype {dtype}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array claims the shape {shape} of {dtype}, but has {len(data):,} bytes")
    return _Array(shape, dtype, len(data))
