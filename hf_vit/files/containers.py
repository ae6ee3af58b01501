"""Containers of named arrays: the reader is chosen by the content of the file or folder."""

from pathlib import Path

from .msgpack_arrays import MsgpackReader, is_msgpack
from .npz import NpzReader
from .tensorstore_arrays import TensorStoreReader, tensorstore_folder

# Each reader is a context manager with `arrays` (name -> description) and `read` (one array).
ArrayReader = NpzReader | MsgpackReader | TensorStoreReader


def array_container(path: Path) -> Path | None:
    """Return the array file or folder of a JAX trainer that a path is or leads to; None for others, such as .npz."""
    return path if path.is_file() and is_msgpack(path) else tensorstore_folder(path)


def open_arrays(path: Path) -> ArrayReader:
    """Open a file or folder of named arrays; an array takes memory only when it is read.

    Raises:
        ValueError: it is damaged or holds no arrays.
        ImportError: a package that its kind needs is not installed.
    """
    if path.is_dir():
        return TensorStoreReader(path)
    return MsgpackReader(path) if is_msgpack(path) else NpzReader(path)
