"""Containers of named arrays: a reader for each kind of file or folder, chosen by its content."""

from pathlib import Path

from .msgpack_arrays import MsgpackReader, is_msgpack
from .npz import NpzReader
from .tensorstore_arrays import TensorStoreReader, tensorstore_folder

# Each has `arrays` (what they are, by their names) and `read` (one of them); it is a context manager.
ArrayReader = NpzReader | MsgpackReader | TensorStoreReader


def array_container(path: Path) -> Path | None:
    """The file or folder of a JAX trainer that a path is or leads to; None for anything else, an .npz too."""
    return path if path.is_file() and is_msgpack(path) else tensorstore_folder(path)


def open_arrays(path: Path) -> ArrayReader:
    """Open a file or folder of named arrays; they are in memory only once they are read.

    Raises:
        ValueError: it is damaged or holds none.
        ImportError: a package that its kind needs is not installed.
    """
    if path.is_dir():
        return TensorStoreReader(path)
    return MsgpackReader(path) if is_msgpack(path) else NpzReader(path)
