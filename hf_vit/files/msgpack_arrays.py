"""Reader for the `.msgpack` files of `flax.serialization.to_bytes`; nothing is unpickled.

The file is a tree of maps. An array is an extension of type 1: a packed (shape, name of the dtype, bytes). An array
above 1 GiB is a map of such arrays, which are concatenated (flax's `_chunk`).
"""

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .limits import MAX_CHECKPOINT_BYTES, check_limit
from .npz import BFLOAT16, SUPPORTED_DTYPES, ArrayInfo, as_tensor
from .versions import require

# The beginning of a map whose first key is printable; excludes the beginning of a .safetensors file (length, then "{").
_BEGINNING = re.compile(rb"(?!...\0{5}{)(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.)[!-~]", re.DOTALL)
_ARRAY = 1  # flax's _MsgpackExtType.ndarray
_CHUNKED = "__msgpack_chunked_array__"


class MsgpackError(ValueError):
    """A fault of a `.msgpack` file; the message names the file."""


def is_msgpack(path: Path) -> bool:
    """Return whether a file begins with a map that has a name, or is called `.msgpack` (it may be damaged)."""
    with open(path, "rb") as file:
        return _BEGINNING.match(file.read(16)) is not None or path.suffix == ".msgpack"


class MsgpackReader:
    """Reader of a `.msgpack` file, whose arrays are all in memory.

    Leaves that are not arrays (a step's number) are ignored.

    Attributes:
        arrays: name -> description of each array, in the order of the file. A name is the path of keys from the root,
            joined by slashes.

    Raises:
        MsgpackError: the file is damaged, holds no arrays, or exceeds a limit.
        ImportError: msgpack is not installed.
    """

    def __init__(self, path: str | os.PathLike):
        require("msgpack")
        import msgpack

        self.path = Path(path)
        size = self.path.stat().st_size
        check_limit(f"{path} has {size:,} bytes", size, MAX_CHECKPOINT_BYTES, MsgpackError)
        try:
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                self._values = dict(_arrays_in(msgpack.unpackb(content, ext_hook=_read_extension)))
        except Exception as error:  # msgpack, NumPy and Python raise nearly anything for damaged bytes
            reason = str(error) or type(error).__name__
            raise MsgpackError(f"{path} is damaged, or is not a tree of arrays in msgpack: {reason}") from error
        if not self._values:
            raise MsgpackError(f"{path} holds no arrays")
        self.arrays = {name: ArrayInfo(it.shape, it.dtype, it.nbytes) for name, it in self._values.items()}

    def read(self, name: str) -> torch.Tensor:
        """Read one array into its own memory."""
        return as_tensor(self._values[name].copy())


def _arrays_in(tree: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array) of every array in a tree."""
    for key, value in tree.items():
        if isinstance(value, dict) and _CHUNKED in value:
            value = np.concatenate(_in_order(value["chunks"])).reshape(_in_order(value["shape"]))
        if isinstance(value, dict):
            yield from _arrays_in(value, (*above, key))
        elif isinstance(value, np.ndarray):
            yield "/".join((*above, key)), value


def _in_order(values: dict[str, Any]) -> list[Any]:
    """Return a list that flax wrote as a map from "0", "1" and so on."""
    return [values[str(index)] for index in range(len(values))]


def _read_extension(kind: int, content: bytes) -> np.ndarray | None:
    """Return the array of an extension; None for a number."""
    import msgpack

    if kind != _ARRAY:
        return None
    shape, name, data = msgpack.unpackb(content)
    dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"an array has the unsupported dtype {dtype}")
    return np.frombuffer(data, dtype).reshape(shape)
