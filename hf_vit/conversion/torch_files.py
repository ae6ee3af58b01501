"""Reader of PyTorch checkpoints: .safetensors, and .pth, .pt or .bin without running any code."""

import argparse
import mmap
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file

from ..files.limits import check_declared
from ..files.npz import check_archive
from ..files.reading import read_json_object
from .tables import ConversionError

_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
# Keys under which training scripts store weights (timm, DeiT, MAE, DINO, Lightning); the first that exists is used.
_CONTAINERS = ("state_dict_ema", "model_ema", "model", "state_dict", "teacher", "student")


def is_torch_file(path: Path) -> bool:
    """Return whether a file is PyTorch's, by its first bytes; a damaged file, by its name."""
    with open(path, "rb") as file:
        start = file.read(16)
    if start[:2] == b"PK":
        try:
            with zipfile.ZipFile(path) as archive:
                return any(name.endswith("/data.pkl") for name in archive.namelist())
        except Exception:  # zipfile raises nearly anything for a damaged directory
            return path.suffix in _SUFFIXES
    return start[:1] == b"\x80" or start[8:9] == b"{" or path.suffix in _SUFFIXES


def read_arrays(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Read all arrays of a file; return name -> array, and the key that held them ("" for the root).

    Raises:
        ConversionError: the file is damaged, holds no arrays, or holds objects that would need code to restore.
    """
    with open(path, "rb") as file:
        is_safetensors = file.read(9)[8:] == b"{" or path.suffix == ".safetensors"
    try:
        contents: Any = load_file(path) if is_safetensors else _read_pickle(path)
    except UnpicklingError as error:
        raise ConversionError(
            f"{path.name} contains pickled objects other than tensors, which could run code and are not loaded; save "
            "only the state_dict"
        ) from error
    except (FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # damaged files raise anything: SafetensorError, RuntimeError, EOFError, KeyError, ...
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConversionError(f"cannot read {path.name}: {reason}") from error
    if not isinstance(contents, dict):
        raise ConversionError(f"{path.name} holds a {type(contents).__name__} (expected a dictionary of arrays)")
    container = next((name for name in _CONTAINERS if isinstance(contents.get(name), dict)), "")
    contents = contents[container] if container else contents
    arrays = {str(name): value for name, value in contents.items() if isinstance(value, torch.Tensor)}
    if not arrays:
        raise ConversionError(f"{path.name} holds no arrays")
    for name, array in arrays.items():
        is_dense = array.layout is torch.strided and not (array.is_nested or array.is_quantized or array.is_meta)
        if not is_dense or (array.is_floating_point() and array.element_size() < 2):
            kind = f"a tensor of {array.dtype} in {array.layout}"
            raise ConversionError(f"{path.name} has {name}, {kind} (expected a dense one of at least 16 bits)")
    declared = sum(array.nbytes for array in arrays.values())  # a copy of an expanded tensor is larger
    check_declared(path.name, declared, path.stat().st_size, ConversionError)
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
        raise ConversionError(f"cannot read {path}: it is not an index of weights ({error!r:.200})") from error
    if any(file.name != str(file) for file in files):
        raise ConversionError(f"cannot read {path}: it names a file in another folder")
    return {name: array for file in files for name, array in read_arrays(path.parent / file)[0].items()}


def _read_pickle(path: Path) -> Any:
    is_archive = zipfile.is_zipfile(path)
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            check_archive(archive, path.stat().st_size)
    with open(path, "rb") as file, torch.serialization.safe_globals([argparse.Namespace]):  # DINO's settings, no code
        # From a file, a length in a damaged pickle takes up to 4 GB of memory; from a map, only what the file has.
        source: Any = path if is_archive else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        contents = torch.load(source, map_location="cpu", weights_only=True)
    if is_archive:
        _check_sums(path, contents)
    return contents


def _check_sums(path: Path, contents: Any) -> None:
    """Compare an archive with its checksums, which PyTorch does not do.

    Storages are compared as loaded, because PyTorch's archive reader may find other bytes than Python's. A file written
    without checksums (`torch.serialization.set_crc32_options(False)`) has only wrong ones, and is read.

    Raises:
        ValueError: a checksum is wrong.
    """
    found, known = [], set()
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if "/data/" in member.filename:
                known.add((member.file_size, member.CRC))
                continue
            try:
                archive.read(member)
                found.append(True)
            except zipfile.BadZipFile:
                found.append(False)
    tensors = [tensor for tensor in _tensors_in(contents) if tensor.layout == torch.strided and not tensor.is_meta]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    for storage in filter(len, storages.values()):
        data: Any = torch.empty(0, dtype=torch.uint8).set_(storage)  # pyright: ignore[reportArgumentType]
        found.append((storage.nbytes(), zlib.crc32(data.numpy())) in known)
    if any(found) and not all(found):
        raise ValueError("a checksum is wrong")


def _tensors_in(contents: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested dictionaries, lists and tuples."""
    if isinstance(contents, torch.Tensor):
        yield contents
    elif isinstance(contents, dict | list | tuple):
        for value in contents.values() if isinstance(contents, dict) else contents:
            yield from _tensors_in(value)
