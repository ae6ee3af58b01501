"""Reader of PyTorch checkpoints: .safetensors, and .pth, .pt or .bin without running any code."""

import argparse
import sys
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from ..files.limits import HOW_TO_ALLOW, allowed, most_bytes
from ..files.npz import NpzError, check_archive
from ..files.reading import read_json_object
from .tables import ConversionError

_BLOCK_SIZE = 1 << 20  # bytes
# Keys under which training scripts store weights (timm, DeiT, MAE, DINO, Lightning); the first that exists is used.
_CONTAINERS = ("state_dict_ema", "model_ema", "model", "state_dict", "teacher", "student")


def is_torch_file(path: Path) -> bool:
    """Tell whether a file is PyTorch's, by its first bytes; a damaged file, by its name."""
    with open(path, "rb") as file:
        start = file.read(16)
    if start[:2] == b"PK":
        try:
            with zipfile.ZipFile(path) as archive:
                return any(name.endswith("/data.pkl") for name in archive.namelist())
        except Exception:  # zipfile raises nearly anything for a damaged directory
            return path.suffix in (".pth", ".pt", ".bin")
    is_pickle = start[:1] == b"\x80"
    return is_pickle or start[8:9] == b"{" or path.suffix in (".safetensors", ".pth", ".pt", ".bin")


def read_arrays(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Read all arrays of a file; return name -> array, and the key that held them ("" for the root).

    Raises:
        ConversionError: the file is damaged, holds no arrays, or holds objects that would need code to restore.
    """
    contents = _read_safetensors(path) if _is_safetensors(path) else _read_pickle(path)
    if not isinstance(contents, dict):
        raise ConversionError(f"{path.name} holds a {type(contents).__name__} (expected a dictionary of arrays)")
    container = next((name for name in _CONTAINERS if isinstance(contents.get(name), dict)), "")
    contents = contents[container] if container else contents
    arrays = {str(name): value for name, value in contents.items() if isinstance(value, torch.Tensor)}
    if not arrays:
        raise ConversionError(f"{path.name} holds no arrays")
    for name, array in arrays.items():
        _check_kind(name, array, path.name)
    return arrays, container


def read_shards(path: Path) -> dict[str, torch.Tensor]:
    """Read the arrays of a file, or of all files of a `*.index.json` of transformers.

    Raises:
        ConversionError: as in `read_arrays`; or the index is damaged.
    """
    if path.suffix != ".json":
        return read_arrays(path)[0]
    try:
        files = sorted({Path(file) for file in read_json_object(path)["weight_map"].values()})
    except Exception as error:
        raise ConversionError(f"cannot read {path}: it is no index of weights ({error!r:.200})") from error
    if any(file.name != str(file) for file in files):
        raise ConversionError(f"cannot read {path}: it names a file in another folder")
    return {name: array for file in files for name, array in read_arrays(path.parent / file)[0].items()}


def _check_kind(name: str, array: torch.Tensor, file: str) -> None:
    """Refuse a tensor that is not dense, has no data, or has a dtype that PyTorch cannot compute with.

    Raises:
        ConversionError: the message names the tensor.
    """
    kinds = {"nested": array.is_nested, "quantized": array.is_quantized, "without numbers (meta)": array.is_meta}
    kinds["sparse"] = array.layout is not torch.strided
    kinds[f"of {array.dtype}".replace("torch.", "")] = array.is_floating_point() and array.element_size() < 2
    if found := [kind for kind, is_one in kinds.items() if is_one]:
        raise ConversionError(
            f"{file} has {name}, a tensor that is {found[0]} (expected a dense one of float16 or more)"
        )


def _is_safetensors(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{" or path.suffix == ".safetensors"


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ConversionError(f"{path.name} is damaged: {error}") from error


def _read_pickle(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # DINO's settings; contains no code
            _check_pickle(path)
            contents = torch.load(path, map_location="cpu", weights_only=True)
        _check_declared(contents, path)
        if problem := _damage(path, contents):
            raise ValueError(problem)
        return contents
    except UnpicklingError as error:
        raise ConversionError(f"{path.name} holds more than arrays, and hf_vit runs no code of a checkpoint") from error
    except (ConversionError, NpzError, FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # damaged pickles raise anything: RuntimeError, EOFError, KeyError, TypeError, ...
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConversionError(f"{path.name} is damaged: {reason}") from error


def _check_pickle(path: Path) -> None:
    """Refuse a pickle that would take far more memory than its file, before it is loaded.

    Raises:
        ConversionError: a file of PyTorch before 1.6 declares implausibly large tensors.
        NpzError: the archive declares implausible sizes.
    """
    with open(path, "rb") as file:
        is_zip = file.read(4) == b"PK\3\4"  # PyTorch's own criterion
    if not is_zip:
        with FakeTensorMode():  # shapes only; PyTorch would allocate memory before it checks the file's size
            _check_declared(torch.load(path, map_location="cpu", weights_only=True), path)
        return
    with zipfile.ZipFile(path) as archive:
        check_archive(archive, path.stat().st_size, path.name)


def _check_declared(contents: Any, path: Path) -> None:
    """Refuse tensors that declare far more bytes than the file has, as expanded tensors can; a copy allocates them."""
    tensors, size = list(_tensors_in(contents)), path.stat().st_size
    declared = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    storages = [tensor.untyped_storage().nbytes() for tensor in tensors if tensor.layout == torch.strided]
    declared = max(declared, *storages, 0)
    most = most_bytes(size)
    if declared > most and not allowed("large"):
        raise ConversionError(
            f"{path.name} declares {declared:,} bytes of tensors in {size:,}; at most {most:,} {HOW_TO_ALLOW}"
        )


def _tensors_in(contents: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested dictionaries, lists and tuples."""
    if isinstance(contents, torch.Tensor):
        yield contents
    elif isinstance(contents, dict | list | tuple):
        for value in contents.values() if isinstance(contents, dict) else contents:
            yield from _tensors_in(value)


def _damage(path: Path, contents: Any) -> str | None:
    """Compare a .pth with its checksums, which PyTorch does not do; return a description of the damage.

    The data are compared as loaded, because PyTorch's archive reader may find other bytes than Python's.

    Returns:
        None for an intact file; for a file of PyTorch before 1.6, which has no checksums; and for a file written
        without checksums (`torch.serialization.set_crc32_options(False)`), in which all are wrong.
    """
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        stored = {member.filename: member for member in archive.infolist()}
        numbers = {name for name in stored if "/data/" in name}
        orders = [
            member for name, member in stored.items() if name.endswith("/byteorder")
        ]  # it holds "little" or "big"
        if any(order.file_size != len(sys.byteorder) for order in orders):  # PyTorch has swapped the bytes
            numbers = set()
        found = {name: _is_whole(archive, stored[name]) for name in stored.keys() - numbers}
    known = {(stored[name].file_size, stored[name].CRC) for name in numbers}
    with ThreadPoolExecutor() as executor:
        checksums = executor.map(_checksum, storages := _storages(contents) if numbers else [])
        right = [(storage.nbytes(), checksum) in known for storage, checksum in zip(storages, checksums, strict=True)]
    wrong = [name for name, is_right in found.items() if not is_right] + ["numbers"] * (not all(right))
    return f"the checksum of {wrong[0]} is wrong" if wrong and any([*right, *found.values()]) else None


def _storages(contents: Any) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors, each once."""
    tensors = [tensor for tensor in _tensors_in(contents) if tensor.layout == torch.strided and not tensor.is_meta]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _checksum(storage: torch.UntypedStorage) -> int:
    return zlib.crc32(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())  # pyright: ignore[reportArgumentType]


def _is_whole(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(member) as stream:
            while stream.read(_BLOCK_SIZE):
                pass
    except zipfile.BadZipFile:
        return False
    return True
