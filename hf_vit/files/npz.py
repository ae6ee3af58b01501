"""Reader and writer of `.npz` files, one array at a time; nothing is unpickled.

`np.load` shows no shape without reading the data, so the zip archive is opened here, and its members are read and
written by `numpy.lib.format`.
"""

import math
import os
import zipfile
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy_format

from .limits import MAX_ARRAYS, check_declared
from .output import new_file

BFLOAT16 = np.dtype("V2")  # NumPy has no bfloat16: the upper half of a float32 is stored as two raw bytes
_INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
_FLOATS = (np.float16, np.float32, np.float64, np.complex64, np.complex128)
SUPPORTED_DTYPES = {BFLOAT16, *map(np.dtype, (np.bool_, *_INTEGERS, *_FLOATS))}
_HEADER_READERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}


class NpzError(ValueError):
    """A fault of an `.npz` file; the message names the file."""


@dataclass(frozen=True)
class ArrayInfo:
    """Header of an array; `dtype` is the stored one, `|V2` for bfloat16."""

    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int


def check_archive(archive: zipfile.ZipFile, size: int) -> None:
    """Refuse an archive with implausible sizes before its first member is opened.

    Args:
        archive: an open zip archive.
        size: size of its file in bytes.

    Raises:
        ValueError: it has too many members, declares implausibly many bytes, or has members that overlap.
    """
    members = archive.infolist()
    if len(members) > MAX_ARRAYS:
        raise ValueError(f"it holds {len(members):,} arrays; at most {MAX_ARRAYS:,} are read")
    if sum(member.compress_size for member in members) > size:
        raise ValueError(f"its arrays overlap in its {size:,} bytes")
    check_declared("it", sum(member.file_size for member in members), size)
    if any(member.comment for member in members):  # a damaged length, which hides the members behind it
        raise ValueError("its zip directory is damaged")


class NpzReader(AbstractContextManager):
    """Reader of an `.npz` file, one array at a time; a context manager for one thread at a time.

    Opening the file reads only the zip directory and the headers.

    Args:
        path: a file written by `np.savez`, `np.savez_compressed` or `write_npz`.

    Attributes:
        arrays: name (without `.npy`) -> description of each array, in the order of the file.

    Raises:
        NpzError: the file is missing, damaged, no npz, empty, or holds anything but numeric arrays.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.arrays: dict[str, ArrayInfo] = {}
        self._members: dict[str, zipfile.ZipInfo] = {}
        reading = ""
        try:
            self._zip = zipfile.ZipFile(self.path)
            check_archive(self._zip, self.path.stat().st_size)
            for member in self._zip.infolist():
                name = member.filename.removesuffix(".npy")
                reading = f" the array {name!r} of"
                if name in self.arrays:
                    raise ValueError("the file holds two arrays of this name")
                self.arrays[name] = self._read_header(member)
                self._members[name] = member
        except Exception as error:  # damaged bytes raise nearly anything
            raise NpzError(f"cannot read{reading} {self.path} (expected an .npz file): {error}") from error
        if not self.arrays:
            raise NpzError(f"{self.path} holds no arrays")

    def __exit__(self, *exception: object) -> None:
        self._zip.close()

    def read(self, name: str) -> torch.Tensor:
        """Read one array into its own memory: contiguous, in native byte order, with its checksum verified.

        Raises:
            NpzError: the file holds no such array, or its data are damaged.
        """
        try:
            with self._zip.open(self._members[name]) as stream:
                array = npy_format.read_array(stream, allow_pickle=False)
                stream.read(1)  # at the end of the data, zipfile compares the checksum
                return as_tensor(array)
        except Exception as error:
            raise NpzError(f"cannot read the array {name!r} of {self.path}: {error}") from error

    def _read_header(self, member: zipfile.ZipInfo) -> ArrayInfo:
        with self._zip.open(member) as stream:
            shape, _, dtype = _HEADER_READERS[npy_format.read_magic(stream)](stream)
            nbytes = member.file_size - stream.tell()
        if dtype.newbyteorder("=") not in SUPPORTED_DTYPES:
            raise ValueError(f"it has the unsupported dtype {dtype}")
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != nbytes:
            raise ValueError(f"its header declares the shape {shape} and the dtype {dtype}, but it has {nbytes} bytes")
        return ArrayInfo(shape, dtype, nbytes)


def write_npz(path: str | os.PathLike, arrays: Iterable[tuple[str, torch.Tensor | np.ndarray]]) -> None:
    """Write arrays like `np.savez`, uncompressed, one at a time; equal arrays give equal bytes.

    The file appears when it is complete; after an error, nothing of it is left.

    Args:
        path: the file to write or replace.
        arrays: (name, array) pairs; bfloat16 tensors are stored as `|V2`, the upper half of each float32.

    Raises:
        NpzError: a dtype is unsupported.
        OSError: the file cannot be written.
    """
    with new_file(path, overwrite=True, flush=True) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, array in arrays:
            member = zipfile.ZipInfo(f"{name}.npy")  # dated 1980-01-01, so that equal arrays make equal files
            member.create_system = 3  # Unix on every system, for the same reason
            try:
                data = _as_array(array)
            except TypeError as error:
                reason = f"the array {name!r} has the unsupported dtype {array.dtype}"
                raise NpzError(f"cannot write {path}: {reason}") from error
            with archive.open(member, "w", force_zip64=True) as stream:
                npy_format.write_array(stream, data, allow_pickle=False)
            del array, data  # free the memory before the next array is made


def _as_array(array: torch.Tensor | np.ndarray) -> np.ndarray:
    """Return a C-contiguous array; bfloat16 becomes pairs of raw bytes."""
    if isinstance(array, torch.Tensor):
        tensor = array.detach().cpu()
        array = tensor.view(torch.int16).numpy().view(BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    if array.dtype.newbyteorder("=") not in SUPPORTED_DTYPES:
        raise TypeError(array.dtype)
    return np.asarray(array, order="C")


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array as a contiguous tensor in native byte order, sharing its memory if the layout allows it."""
    if not array.dtype.isnative:
        array = array.byteswap(inplace=True).view(array.dtype.newbyteorder())
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).contiguous().view(torch.bfloat16)
    return torch.from_numpy(array).contiguous()
