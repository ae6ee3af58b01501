"""Containers of named arrays: a reader for each kind of file, chosen by its content."""

from pathlib import Path

from .msgpack_arrays import MsgpackReader, is_msgpack
from .npz import NpzReader

# Each has `arrays` (what they are, by their names), `read` (one of them) and `close`; it is a context manager.
ArrayReader = NpzReader | MsgpackReader


def open_arrays(path: Path) -> ArrayReader:
    """Open a file of named arrays; they are in memory only once they are read.

    Raises:
        ValueError: it is damaged or holds none.
        ImportError: a package that its kind needs is not installed.
    """
    return MsgpackReader(path) if is_msgpack(path) else NpzReader(path)
