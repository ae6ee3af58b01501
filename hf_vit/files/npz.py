"""Reader and writer of `.npz` files, one array at a time; nothing is unpickled.

`np.load` does not suffice: it has no bfloat16, needs the data to tell a shape, and raises arbitrary exceptions for a
damaged file.
"""

import io
import math
import os
import struct
import warnings
import zipfile
import zlib
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

BLOCK_SIZE = 1 << 20  # bytes; small enough that the checksum finds them in the processor's cache
_END_RECORD = struct.Struct("<4s6xH10x")  # end record of a zip archive: signature, number of members
_TOO_MANY_MEMBERS = 0xFFFF  # means that only the zip64 record holds the number
_LOCAL_HEADER = struct.Struct("<26xHH")  # header of a zip member; its last fields are the lengths of name and extra
_MAX_DEFLATE_RATIO = 1032  # maximum compression of deflate (zlib's technical notes)
_MAX_ELEMENTS = 2**48  # above any checkpoint, below the overflow of NumPy's index arithmetic
_MAX_DIMENSIONS = 32  # NumPy 1's limit
_MAX_HEADER = 10_000  # bytes of a .npy header; NumPy has the same limit, but checks it after allocating
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


@dataclass(frozen=True)
class _Member:
    """Place of an array in the zip archive, and layout of its data."""

    zip_info: zipfile.ZipInfo
    header_size: int  # size of the .npy header in bytes
    fortran_order: bool


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
        self._members: dict[str, _Member] = {}
        self._file = self._open_file()
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
        info, member = self.arrays[name], self._members[name]
        stored = member.zip_info.compress_type == zipfile.ZIP_STORED
        with self._naming(name):
            buffer = np.empty(info.nbytes, np.uint8)  # torch's aligned buffers take twice the memory: glibc reuses few
            (self._read_stored if stored else self._read_deflated)(member, buffer.data)
            return as_tensor(buffer, info, member.fortran_order)

    def _open_file(self) -> BufferedReader:
        if self.path.is_dir():
            raise NpzError(f"{self.path} is a folder (expected an .npz file)")
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise NpzError(f"cannot open {self.path}: {error.strerror}") from error

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
        _check_member(zip_info, _file_size(self._file))
        with self._zip.open(zip_info) as stream:
            shape, fortran_order, dtype = _read_npy_header(stream)
            header_size = stream.tell()
        _check_array(shape, dtype, zip_info.file_size - header_size)
        self.arrays[name] = ArrayInfo(name, shape, dtype, zip_info.file_size - header_size)
        self._members[name] = _Member(zip_info, header_size, fortran_order)

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Turn any exception into an `NpzError` that names file and array; damaged bytes can raise nearly anything."""
        try:
            yield
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise NpzError(f"{self.path}: cannot read the array {name!r}: {reason}") from error

    def _read_stored(self, member: _Member, data: memoryview) -> None:
        """Fill `data` directly from the file."""
        self._file.seek(member.zip_info.header_offset)
        name_length, extra_length = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        self._file.seek(name_length + extra_length, os.SEEK_CUR)
        checksum = zlib.crc32(self._file.read(member.header_size))
        for block in _blocks(data):
            if self._file.readinto(block) != len(block):
                raise EOFError("the file ends within its data")
            checksum = zlib.crc32(block, checksum)
        if checksum != member.zip_info.CRC:
            raise ValueError(f"its checksum is {checksum:08x} (expected {member.zip_info.CRC:08x})")

    def _read_deflated(self, member: _Member, data: memoryview) -> None:
        with self._zip.open(member.zip_info) as stream:
            stream.read(member.header_size)
            for block in _blocks(data):
                if stream.readinto(block) != len(block):  # type: ignore[attr-defined]
                    raise EOFError("its compressed data end too early")
            stream.read(1)  # at the end of the data, zipfile compares the checksum


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
            _write_member(archive, name, data)
            del array, data  # free the memory before the next array is made
    if not names:
        raise NpzError(f"cannot write {path}: there are no arrays")


def _write_member(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    zip_info = zipfile.ZipInfo(f"{name}.npy")  # dated 1980-01-01, so that equal arrays make equal files
    zip_info.create_system = 3  # Unix on every system, for the same reason
    header = {"descr": npy_format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    with archive.open(zip_info, "w", force_zip64=True) as stream:
        npy_format.write_array_header_1_0(stream, header)
        for block in _blocks(array.reshape(-1).view(np.uint8).data):
            stream.write(block)


def _as_array(array: torch.Tensor | np.ndarray) -> np.ndarray:
    """Return a C-contiguous array; bfloat16 becomes pairs of raw bytes."""
    if isinstance(array, torch.Tensor):
        tensor = array.detach().cpu()
        array = tensor.view(torch.int16).numpy().view(BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    if array.dtype.newbyteorder("=") not in SUPPORTED_DTYPES:
        raise TypeError(array.dtype)
    return np.asarray(array, order="C")


def as_tensor(buffer: np.ndarray, info: ArrayInfo, fortran_order: bool = False) -> torch.Tensor:
    """Return the tensor whose stored bytes are in `buffer`, sharing its memory if the layout allows it."""
    array = buffer.view(np.int16 if info.dtype == BFLOAT16 else info.dtype)
    if not array.dtype.isnative:
        array = array.byteswap(inplace=True).view(array.dtype.newbyteorder())
    array = array.reshape(info.shape[::-1]).T if fortran_order else array.reshape(info.shape)
    tensor = torch.from_numpy(array).contiguous()
    return tensor.view(torch.bfloat16) if info.dtype == BFLOAT16 else tensor


def _check_member(zip_info: zipfile.ZipInfo, file_size: int) -> None:
    """Refuse sizes that the file cannot hold, before memory is allocated for them."""
    max_ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _MAX_DEFLATE_RATIO}.get(zip_info.compress_type)
    if max_ratio is None or zip_info.flag_bits & 1:
        raise ValueError("it is encrypted or compressed by another method than deflate")
    if zip_info.header_offset + zip_info.compress_size > file_size:
        raise ValueError(f"it ends after the end of the file, which has {file_size} bytes")
    if zip_info.file_size > zip_info.compress_size * max_ratio:
        raise ValueError(f"it declares {zip_info.file_size} bytes, but only {zip_info.compress_size} are stored")


def _read_npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return (shape, True for Fortran order, dtype)."""
    magic = stream.read(npy_format.MAGIC_LEN)
    readers = {b"\1\0": npy_format.read_array_header_1_0, b"\2\0": npy_format.read_array_header_2_0}
    prefix, version = magic[:-2], magic[-2:]
    if prefix != npy_format.MAGIC_PREFIX or version not in readers:
        raise ValueError(f"it begins with {magic!r} (expected a .npy array of version 1.0 or 2.0)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers written by Python 2
        try:
            length = stream.read(2 if version == b"\1\0" else 4)
            if (size := int.from_bytes(length, "little")) > _MAX_HEADER:
                raise ValueError(f"its .npy header has {size:,} bytes; at most {_MAX_HEADER:,} are read")
            return readers[version](io.BytesIO(length + stream.read(size)))
        except SyntaxError as error:
            raise ValueError("its .npy header is damaged") from error


def _check_array(shape: tuple[int, ...], dtype: np.dtype, data_size: int) -> None:
    if dtype.hasobject:
        raise ValueError("it has the dtype object: a pickle, which could run any code")
    if dtype.newbyteorder("=") not in SUPPORTED_DTYPES:
        raise ValueError(f"it has the unsupported dtype {dtype}")
    if not all(type(side) is int for side in shape):  # True is an int to NumPy
        raise ValueError(f"its header declares the shape {shape} (expected integers)")
    if min(shape, default=0) < 0 or len(shape) > _MAX_DIMENSIONS or math.prod(d or 1 for d in shape) > _MAX_ELEMENTS:
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


def _blocks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), BLOCK_SIZE):
        yield data[start : start + BLOCK_SIZE]


def _file_size(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size
