"""Reading and writing `.npz` files one array at a time, without ever unpickling.

`np.load` reads them too, but it knows no bfloat16, tells no shape without reading the data, and answers a damaged file
with whatever exception its parsers happen to raise.
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

BLOCK_SIZE = 1 << 20  # bytes; the checksum is taken while they are in the processor's cache
_END_RECORD = struct.Struct("<4s6xH10x")  # of a zip archive: its signature, the number of members
_TOO_MANY_MEMBERS = 0xFFFF  # stands for a number that only the zip64 record holds
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip member; the last two fields are the lengths of its name and extra
_MAX_DEFLATE_RATIO = 1032  # the most that deflate shrinks anything (zlib's technical notes)
_MAX_ELEMENTS = 2**48  # more than any checkpoint has, less than what overflows NumPy's index arithmetic
_MAX_DIMENSIONS = 32  # NumPy 1's limit
_MAX_HEADER = 10_000  # bytes of a .npy header, NumPy's limit, which it checks once they are in memory
BFLOAT16 = np.dtype("V2")  # NumPy has no bfloat16: the upper half of a float32 is stored as two raw bytes
_INTEGERS = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)
_FLOATS = (np.float16, np.float32, np.float64, np.complex64, np.complex128)
SUPPORTED_DTYPES = {BFLOAT16, *map(np.dtype, (np.bool_, *_INTEGERS, *_FLOATS))}


class NpzError(ValueError):
    """What is wrong with an `.npz` file, in one sentence that names it."""


@dataclass(frozen=True)
class ArrayInfo:
    """What the header of an array says; `dtype` is the stored one, `|V2` for bfloat16."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int


@dataclass(frozen=True)
class _Member:
    """Where an array stands in the zip archive and how its data are laid out."""

    zip_info: zipfile.ZipInfo
    header_size: int  # of the .npy header, in bytes
    fortran_order: bool


def check_archive(archive: zipfile.ZipFile, size: int, path: str) -> None:
    """Refuse an archive that declares more than any checkpoint has, before its first member is opened.

    Args:
        size: bytes of its file.

    Raises:
        NpzError: too many members, more bytes in all than it can plausibly hold, or members that overlap.
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
    """Reads an `.npz` file array by array; opening it reads only the zip directory and the headers.

    A context manager, for one thread at a time.

    Args:
        path: a file as `np.savez`, `np.savez_compressed` or `write_npz` writes it.

    Attributes:
        arrays: what each array is, by its name (without `.npy`), in the order of the file.

    Raises:
        NpzError: if the file is missing, damaged, no npz, empty, or holds anything but numeric arrays.
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
                with self._reasons_placed(name):
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
        """Read one array into memory of its own: contiguous, native byte order, checksum verified.

        Raises:
            NpzError: if the file holds no such array or its data are damaged.
        """
        if name not in self.arrays:
            raise NpzError(f"{self.path} holds no array {name!r}")
        info, member = self.arrays[name], self._members[name]
        stored = member.zip_info.compress_type == zipfile.ZIP_STORED
        with self._reasons_placed(name):
            buffer = np.empty(info.nbytes, np.uint8)  # of torch's aligned buffers, glibc re-uses few: twice the memory
            (self._read_stored if stored else self._read_deflated)(member, buffer.data)
            return as_tensor(buffer, info, member.fortran_order)

    def _open_file(self) -> BufferedReader:
        if self.path.is_dir():
            raise NpzError(f"{self.path} is a folder, not an .npz file")
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise NpzError(f"{self.path} cannot be opened: {error.strerror}") from error

    def _open_zip(self) -> zipfile.ZipFile:
        beginning = self._file.read(6)
        if beginning == npy_format.MAGIC_PREFIX:
            raise NpzError(f"{self.path} is a single .npy array, not an .npz file")
        if not beginning.startswith(b"PK"):
            raise NpzError(f"{self.path} is not an .npz file: it begins with {beginning!r}, a zip archive with b'PK'")
        try:
            archive = zipfile.ZipFile(self._file)
            found, stated = len(archive.infolist()), _stated_members(self._file)
        except Exception as error:  # a damaged directory raises more from zipfile than BadZipFile
            size = _file_size(self._file)
            raise NpzError(f"{self.path} is truncated or damaged: its {size} bytes hold no zip directory") from error
        if stated not in (found, _TOO_MANY_MEMBERS):  # zipfile overlooks it when one entry swallows the next
            raise NpzError(f"{self.path} is damaged: {found} of the {stated} arrays in its zip directory can be found")
        return archive

    def _add_array(self, name: str, zip_info: zipfile.ZipInfo) -> None:
        if name in self.arrays:
            raise ValueError("the file holds two of that name")
        _check_member(zip_info, _file_size(self._file))
        with self._zip.open(zip_info) as stream:
            shape, fortran_order, dtype = _read_npy_header(stream)
            header_size = stream.tell()
        _check_array(shape, dtype, zip_info.file_size - header_size)
        self.arrays[name] = ArrayInfo(name, shape, dtype, zip_info.file_size - header_size)
        self._members[name] = _Member(zip_info, header_size, fortran_order)

    @contextmanager
    def _reasons_placed(self, name: str) -> Iterator[None]:
        """Add file and array to what is raised; for damaged bytes zipfile and NumPy raise nearly anything."""
        try:
            yield
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise NpzError(f"{self.path}: the array {name!r} cannot be read: {reason}") from error

    def _read_stored(self, member: _Member, data: memoryview) -> None:
        """Fill `data` straight from the file."""
        self._file.seek(member.zip_info.header_offset)
        name_length, extra_length = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        self._file.seek(name_length + extra_length, os.SEEK_CUR)
        checksum = zlib.crc32(self._file.read(member.header_size))
        for block in _blocks(data):
            if self._file.readinto(block) != len(block):
                raise EOFError("the file ends within its data")
            checksum = zlib.crc32(block, checksum)
        if checksum != member.zip_info.CRC:
            raise ValueError(f"its checksum is {checksum:08x}, not {member.zip_info.CRC:08x} as the file says")

    def _read_deflated(self, member: _Member, data: memoryview) -> None:
        with self._zip.open(member.zip_info) as stream:
            stream.read(member.header_size)
            for block in _blocks(data):
                if stream.readinto(block) != len(block):  # type: ignore[attr-defined]
                    raise EOFError("its compressed data end too early")
            stream.read(1)  # to the end, where zipfile compares the checksum


def write_npz(path: str | os.PathLike, arrays: Iterable[tuple[str, torch.Tensor | np.ndarray]]) -> None:
    """Write arrays as `np.savez` does, not compressed, one at a time and with the same bytes every time.

    The file appears under its name when it is complete; if anything fails there is no trace of it.

    Args:
        arrays: (name, array) pairs; bfloat16 tensors are stored as `|V2`, the upper half of each float32.

    Raises:
        NpzError: for a name given twice, an unsupported dtype, no arrays at all, or a file that cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():  # a mistake in the name
        raise NpzError(f"{path} cannot be written: No such file or directory ({path.parent})")
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
                raise NpzError(f"{path} cannot be written: two arrays have the name {name!r}")
            names.add(name)
            try:
                data = _as_array(array)
            except TypeError as error:
                reason = f"the array {name!r} has the unsupported dtype {array.dtype}"
                raise NpzError(f"{path} cannot be written: {reason}") from error
            _write_member(archive, name, data)
            del array, data  # before the next one is made
    if not names:
        raise NpzError(f"{path} cannot be written: there are no arrays")


def _write_member(archive: zipfile.ZipFile, name: str, array: np.ndarray) -> None:
    zip_info = zipfile.ZipInfo(f"{name}.npy")  # dated 1980-01-01, so that equal arrays make equal files
    zip_info.create_system = 3  # Unix on every system, for the same reason
    header = {"descr": npy_format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": array.shape}
    with archive.open(zip_info, "w", force_zip64=True) as stream:
        npy_format.write_array_header_1_0(stream, header)
        for block in _blocks(array.reshape(-1).view(np.uint8).data):
            stream.write(block)


def _as_array(array: torch.Tensor | np.ndarray) -> np.ndarray:
    """A C-contiguous array, bfloat16 as raw pairs of bytes."""
    if isinstance(array, torch.Tensor):
        tensor = array.detach().cpu()
        array = tensor.view(torch.int16).numpy().view(BFLOAT16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    if array.dtype.newbyteorder("=") not in SUPPORTED_DTYPES:
        raise TypeError(array.dtype)
    return np.asarray(array, order="C")


def as_tensor(buffer: np.ndarray, info: ArrayInfo, fortran_order: bool = False) -> torch.Tensor:
    """The tensor whose stored bytes are in `buffer`, in the same memory if its layout allows."""
    array = buffer.view(np.int16 if info.dtype == BFLOAT16 else info.dtype)
    if not array.dtype.isnative:
        array = array.byteswap(inplace=True).view(array.dtype.newbyteorder())
    array = array.reshape(info.shape[::-1]).T if fortran_order else array.reshape(info.shape)
    tensor = torch.from_numpy(array).contiguous()
    return tensor.view(torch.bfloat16) if info.dtype == BFLOAT16 else tensor


def _check_member(zip_info: zipfile.ZipInfo, file_size: int) -> None:
    """Refuse sizes that the file cannot hold, before memory is taken for them."""
    max_ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: _MAX_DEFLATE_RATIO}.get(zip_info.compress_type)
    if max_ratio is None or zip_info.flag_bits & 1:
        raise ValueError("it is encrypted or compressed by another method than deflate")
    if zip_info.header_offset + zip_info.compress_size > file_size:
        raise ValueError(f"it goes beyond the end of the file, which has {file_size} bytes")
    if zip_info.file_size > zip_info.compress_size * max_ratio:
        raise ValueError(f"it claims {zip_info.file_size} bytes, of which {zip_info.compress_size} are stored")


def _read_npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """The shape, whether the order is Fortran's, and the dtype."""
    magic = stream.read(npy_format.MAGIC_LEN)
    readers = {b"\1\0": npy_format.read_array_header_1_0, b"\2\0": npy_format.read_array_header_2_0}
    prefix, version = magic[:-2], magic[-2:]
    if prefix != npy_format.MAGIC_PREFIX or version not in readers:
        raise ValueError(f"it begins with {magic!r}, not as a .npy array of version 1.0 or 2.0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers that Python 2 wrote
        try:
            length = stream.read(2 if version == b"\1\0" else 4)
            if (size := int.from_bytes(length, "little")) > _MAX_HEADER:
                raise ValueError(f"its .npy header has {size:,} bytes; at most {_MAX_HEADER:,} are read")
            return readers[version](io.BytesIO(length + stream.read(size)))
        except SyntaxError as error:
            raise ValueError("its .npy header is damaged") from error


def _check_array(shape: tuple[int, ...], dtype: np.dtype, data_size: int) -> None:
    if dtype.hasobject:
        raise ValueError("it has the dtype object, a pickle that could run any code")
    if dtype.newbyteorder("=") not in SUPPORTED_DTYPES:
        raise ValueError(f"it has the unsupported dtype {dtype}")
    if not all(type(side) is int for side in shape):  # True is an int to NumPy
        raise ValueError(f"its header claims the shape {shape}, in which something is no number")
    if min(shape, default=0) < 0 or len(shape) > _MAX_DIMENSIONS or math.prod(d or 1 for d in shape) > _MAX_ELEMENTS:
        raise ValueError(f"its header claims the impossible shape {shape}")
    if math.prod(shape) * dtype.itemsize != data_size:
        raise ValueError(
            f"its header claims the shape {shape} and the dtype {dtype}, which need "
            f"{math.prod(shape) * dtype.itemsize} bytes, but {data_size} are there"
        )


def _stated_members(file: BufferedReader) -> int:
    """How many members the end record of a zip archive speaks of; only a comment of at most 64 KiB comes after it."""
    file.seek(-min(_file_size(file), _END_RECORD.size + 2**16), os.SEEK_END)
    tail = file.read()
    return _END_RECORD.unpack_from(tail, tail.rindex(b"PK\5\6"))[1]


def _blocks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), BLOCK_SIZE):
        yield data[start : start + BLOCK_SIZE]


def _file_size(file: BufferedReader) -> int:
    return os.fstat(file.fileno()).st_size
