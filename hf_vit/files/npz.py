"""Reader and writer of `.npz` files, one array at a time; nothing is unpickled.

`np.load` shows no shape without reading the data, and raises any exception for a damaged file; so the zip archive is
opened here, and its members are read and written by `numpy.lib.format`.
"""

import io
import math
import os
import struct
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy_format

from .limits import HOW_TO_ALLOW, MAX_ARRAYS, allowed, most_bytes
from .output import new_file

_END_RECORD = struct.Struct("<4s6xH10x")  # end record of a zip archive: signature, number of members
_LONGEST_HEADER = 2**16  # bytes; those that numpy writes have 64 or a few hundred
_TOO_MANY_MEMBERS = 0xFFFF  # means that only the zip64 record holds the number
_MAX_ELEMENTS = 2**48  # above any checkpoint, below the overflow of NumPy's index arithmetic
_MAX_DIMENSIONS = 32  # NumPy 1's limit
BFLOAT16 = np.dtype("V2")  # NumPy has no bfloat16: the upper half of a float32 is stored as two raw bytes
_INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
_FLOATS = (np.float16, np.float32, np.float64, np.complex64, np.complex128)
SUPPORTED_DTYPES = {BFLOAT16, *map(np.dtype, (np.bool_, *_INTEGERS, *_FLOATS))}


class NpzError(ValueError):
    """A fault of an `.npz` file; the message names the file."""


@dataclass(frozen=True)
class ArrayInfo:
    """Header of an array; `dtype` is the stored one, `|V2` for bfloat16."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int


def check_archive(archive: zipfile.ZipFile, size: int, path: str) -> None:
    """Refuse an archive with implausible sizes before its first member is opened.

    Args:
        archive: an open zip archive.
        size: size of its file in bytes.
        path: its path, for messages.

    Raises:
        NpzError: it has too many members, declares implausibly many bytes, or has members that overlap.
    """
    members = archive.infolist()
    if len(members) > MAX_ARRAYS:
        raise NpzError(f"{path} holds {len(members):,} arrays; at most {MAX_ARRAYS:,} are read")
    if sum(member.compress_size for member in members) > size:
        raise NpzError(f"{path} is damaged: its arrays overlap in its {size:,} bytes")
    declared, most = sum(member.file_size for member in members), most_bytes(size)
    if declared > most and not allowed("large"):
        raise NpzError(f"{path} declares {declared:,} bytes of arrays in {size:,}; at most {most:,} {HOW_TO_ALLOW}")


class NpzReader:
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
        if self.path.is_dir():
            raise NpzError(f"{self.path} is a folder (expected an .npz file)")
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115 - closed by `close`
        except OSError as error:
            raise NpzError(f"cannot open {self.path}: {error.strerror}") from error
        try:
            self._zip = self._open_zip()
            check_archive(self._zip, _file_size(self._file), str(self.path))
            for zip_info in self._zip.infolist():
                name = zip_info.filename.removesuffix(".npy")
                with self._naming(name):
                    self._add_array(name, zip_info)
            if not self.arrays:
                raise NpzError(f"{self.path} holds no arrays")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "NpzReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read(self, name: str) -> torch.Tensor:
        """Read one array into its own memory: contiguous, in native byte order, with its checksum verified.

        Raises:
            NpzError: the file holds no such array, or its data are damaged.
        """
        if name not in self.arrays:
            raise NpzError(f"{self.path} holds no array {name!r}")
        with self._naming(name), self._zip.open(self._members[name]) as stream:
            array = npy_format.read_array(stream, allow_pickle=False)
            stream.read(1)  # at the end of the data, zipfile compares the checksum
            return _tensor_of(array)

    def _open_zip(self) -> zipfile.ZipFile:
        beginning = self._file.read(6)
        if beginning == npy_format.MAGIC_PREFIX:
            raise NpzError(f"{self.path} is a single .npy array (expected an .npz file)")
        if not beginning.startswith(b"PK"):
            raise NpzError(f"{self.path} is not an .npz file: it begins with {beginning!r} (expected b'PK')")
        try:
            archive = zipfile.ZipFile(self._file)
            found, stated = len(archive.infolist()), _stated_members(self._file)
        except Exception as error:  # for a damaged directory, zipfile raises more than BadZipFile
            size = _file_size(self._file)
            raise NpzError(f"{self.path} is truncated or damaged: its {size} bytes hold no zip directory") from error
        if stated not in (found, _TOO_MANY_MEMBERS):  # zipfile does not notice an entry that covers the next one
            raise NpzError(f"{self.path} is damaged: only {found} of {stated} arrays in its zip directory are readable")
        return archive

    def _add_array(self, name: str, zip_info: zipfile.ZipInfo) -> None:
        if name in self.arrays:
            raise ValueError("the file holds two arrays of this name")
        with self._zip.open(zip_info) as stream:
            beginning = io.BytesIO(stream.read(_LONGEST_HEADER))  # numpy would read any length that a file declares
        shape, dtype = _read_npy_header(beginning)
        nbytes = zip_info.file_size - beginning.tell()
        _check_array(shape, dtype, nbytes)
        self.arrays[name] = ArrayInfo(name, shape, dtype, nbytes)
        self._members[name] = zip_info

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Turn any exception into an `NpzError` that names file and array; damaged bytes can raise nearly anything."""
        try:
            yield
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise NpzError(f"{self.path}: cannot read the array {name!r}: {reason}") from error


def write_npz(path: str | os.PathLike, arrays: Iterable[tuple[str, torch.Tensor | np.ndarray]]) -> None:
    """Write arrays like `np.savez`, uncompressed, one at a time; equal arrays give equal bytes.

    The file appears when it is complete; after an error, nothing of it is left.

    Args:
        path: the file to write or replace.
        arrays: (name, array) pairs; bfloat16 tensors are stored as `|V2`, the upper half of each float32.

    Raises:
        NpzError: a name is given twice, a dtype is unsupported, there are no arrays, or the file cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():  # probably a typing error
        raise NpzError(f"cannot write {path}: No such file or directory ({path.parent})")
    try:
        with new_file(path, overwrite=True, flush=True) as temporary, open(temporary, "wb") as file:
            _write_zip(file, path, arrays)
    except OSError as error:
        raise NpzError(str(error)) from error


def _write_zip(file: IO[bytes], path: Path, arrays: Iterable[tuple[str, torch.Tensor | np.ndarray]]) -> None:
    names = set()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays:
            if name in names:
                raise NpzError(f"cannot write {path}: two arrays have the name {name!r}")
            names.add(name)
            try:
                data = _as_array(array)
            except TypeError as error:
                reason = f"the array {name!r} has the unsupported dtype {array.dtype}"
                raise NpzError(f"cannot write {path}: {reason}") from error
            zip_info = zipfile.ZipInfo(f"{name}.npy")  # dated 1980-01-01, so that equal arrays make equal files
            zip_info.create_system = 3  # Unix on every system, for the same reason
            with archive.open(zip_info, "w", force_zip64=True) as stream:
                npy_format.write_array(stream, data, allow_pickle=False)
            del array, data  # free the memory before the next array is made
    if not names:
        raise NpzError(f"cannot write {path}: there are no arrays")


def _as_array(array: torch.Tensor | np.ndarray) -> np.ndarray:
    """Return a C-contiguous array; bfloat16 becomes pairs of raw bytes."""
    if isinstance(array, torch.Tensor):
        tensor = array.detach().cpu()
        array = tensor.view(torch.int16).numpy().view(BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    if array.dtype.newbyteorder("=") not in SUPPORTED_DTYPES:
        raise TypeError(array.dtype)
    return np.asarray(array, order="C")


def as_tensor(buffer: np.ndarray, info: ArrayInfo) -> torch.Tensor:
    """Return the tensor whose stored bytes are in `buffer`, sharing its memory."""
    return _tensor_of(buffer.view(info.dtype).reshape(info.shape))


def _tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return an array as a contiguous tensor in native byte order, sharing its memory if the layout allows it."""
    if not array.dtype.isnative:
        array = array.byteswap(inplace=True).view(array.dtype.newbyteorder())
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).contiguous().view(torch.bfloat16)
    return torch.from_numpy(array).contiguous()


def _read_npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Return (shape, dtype)."""
    readers = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
    version = npy_format.read_magic(stream)
    if version not in readers:
        raise ValueError(f"it is a .npy array of version {version} (expected 1.0 or 2.0)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers written by Python 2
        shape, _, dtype = readers[version](stream)
    return shape, dtype


def _check_array(shape: tuple[int, ...], dtype: np.dtype, data_size: int) -> None:
    if dtype.hasobject:
        raise ValueError("it has the dtype object: a pickle, which could run any code")
    if dtype.newbyteorder("=") not in SUPPORTED_DTYPES:
        raise ValueError(f"it has the unsupported dtype {dtype}")
    sides = [side if type(side) is int else -1 for side in shape]  # True is an int to NumPy
    if min(sides, default=0) < 0 or len(sides) > _MAX_DIMENSIONS or math.prod(d or 1 for d in sides) > _MAX_ELEMENTS:
        raise ValueError(f"its header declares the impossible shape {shape}")
    if math.prod(shape) * dtype.itemsize != data_size:
        raise ValueError(
            f"its header declares the shape {shape} and the dtype {dtype}, which need "
            f"{math.prod(shape) * dtype.itemsize} bytes, but it has {data_size}"
        )


def _stated_members(file: BufferedReader) -> int:
    """Return the number of members in the end record of a zip archive; a comment of up to 64 KiB may follow it."""
    file.seek(-min(_file_size(file), _END_RECORD.size + 2**16), os.SEEK_END)
    tail = file.read()
    return _END_RECORD.unpack_from(tail, tail.rindex(b"PK\5\6"))[1]


def _file_size(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size
