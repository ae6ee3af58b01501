"""An open checkpoint, before its source is recognized and its arrays are read.

PyTorch's files (.safetensors, and .pth, .pt or .bin) are read without running any code.
"""

import argparse
import mmap
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from pickle import UnpicklingError
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file
from transformers.utils import logging

from ..catalog import copies_of, layers_missing_in
from ..files.download import BUCKETS, Fetched, SourceError, UnavailableError, fetch, fetch_folder, is_folder_address
from ..files.limits import check_declared
from ..files.model_files import HUB_NAME, check_model_path
from ..files.msgpack_arrays import MsgpackReader, is_msgpack
from ..files.npz import NpzReader, check_archive
from ..files.reading import read_json_object
from ..files.tensorstore_arrays import TensorStoreReader, tensorstore_folder
from .tables import ConversionError
from .weight_sets import choose_weights, find_weight_sets

_TORCH_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
_SUFFIXES = (".npz", *_TORCH_SUFFIXES, ".msgpack")


def _plain_dict(*_: Any) -> dict[Any, Any]:
    """Stand in for a defaultdict, whose entries torch does not restore."""
    return {}


# What stands beside the weights in checkpoints of PyTorch, and runs no code when it is restored: options of a program,
# NumPy's numbers (no arrays), paths and dictionaries; for some also their names in other versions.
_NUMBER_KINDS = (*"?bhilqBHILQefd", "U1")
_SAFE: list[Any] = [
    argparse.Namespace,
    (_plain_dict, "collections.defaultdict"),
    *(dict, list, set, int, float, str),
    np.dtype,
    *{type(np.dtype(kind)) for kind in _NUMBER_KINDS},
    *((np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]
for _module in ("pathlib", "pathlib._local"):
    _SAFE += [(PurePosixPath, f"{_module}.{kind}PosixPath") for kind in ("", "Pure")]
    _SAFE += [(PureWindowsPath, f"{_module}.{kind}WindowsPath") for kind in ("", "Pure")]
logger = logging.get_logger(__name__)
# Weights in a folder with a config.json; the first that exists is used.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "flax_model.msgpack",
)
TIMM_WRAPPER = "timm_wrapper"  # model_type of a folder of timm that transformers wrote
_PROGRAM_SUFFIXES = (".onnx", ".xml", ".pt2")
_FOREIGN = {  # by the first bytes of the file
    b"<!doctyp": "a web page: download the file itself",
    b"<html": "a web page: download the file itself",
    b"version ": "a Git LFS pointer: fetch the file itself with `git lfs pull`",
    b"\x89hdf\r\n\x1a\n": "a Keras model, which hf_vit does not read: convert the .npz file of the same name",
}


def container_of(path: Path) -> str:
    """Return the kind of a file or folder of arrays, by its content; of a damaged file, by its name.

    It is "tensorstore", "msgpack", "safetensors", "pickle" (of PyTorch) or "npz", also for any other file.
    """
    if path.is_dir():
        return "tensorstore"
    if is_msgpack(path):
        return "msgpack"
    with suppress(Exception), zipfile.ZipFile(path) as archive:  # zipfile raises nearly anything for another file
        return "pickle" if any(name.endswith("/data.pkl") for name in archive.namelist()) else "npz"
    with open(path, "rb") as file:
        start = file.read(9)
    if start[8:] == b"{" or path.suffix == ".safetensors":
        return "safetensors"
    return "pickle" if start[:1] == b"\x80" or path.suffix in _TORCH_SUFFIXES else "npz"


def read_arrays(path: Path, weights: str | None = None) -> tuple[dict[str, torch.Tensor], str]:
    """Read all arrays of a file; return name -> array, and the keys that held them ("" for the root).

    Args:
        path: the file.
        weights: which of several sets of weights to read, see `choose_weights`.

    Raises:
        ConversionError: the file is damaged, holds no arrays, holds objects that would need code to restore, or several
            sets of weights.
    """
    read: Callable[[Path], Any] = load_file if container_of(path) == "safetensors" else _read_pickle
    try:
        contents = read(path)
    except UnpicklingError as error:
        raise ConversionError(
            f"{path.name} contains pickled objects other than tensors, which could run code and are not loaded; save "
            "only the state_dict"
        ) from error
    except Exception as error:  # damaged files raise anything: SafetensorError, RuntimeError, EOFError, KeyError, ...
        raise ConversionError(f"cannot read {path.name}: {error!r:.300}") from error
    sets = find_weight_sets(contents)
    if not sets:
        found = type(contents).__name__
        if isinstance(contents, dict):
            found = ", ".join(map(str, contents))
        raise ConversionError(f"{path.name} holds no dictionary of arrays (found: {found:.300})")
    if len(sets) == 1:
        weights = None  # or a prefix of names of arrays, see `TorchSource`
    container = choose_weights(list(sets), weights, path.name)
    arrays = sets[container]
    for name, array in arrays.items():
        if not _is_dense(array) or (array.is_floating_point() and array.element_size() < 2):
            kind = f"a tensor of {array.dtype} in {array.layout}"
            raise ConversionError(f"{path.name} has {name}, {kind} (expected a dense one of at least 16 bits)")
    declared = sum(array.nbytes for array in arrays.values())  # a copy of an expanded tensor is larger
    check_declared(path.name, declared, path.stat().st_size, ConversionError)
    return arrays, container


def _is_dense(array: torch.Tensor) -> bool:
    return array.layout is torch.strided and not (array.is_nested or array.is_quantized or array.is_meta)


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
    with open(path, "rb") as file, torch.serialization.safe_globals(_SAFE):
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


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint.

    Attributes:
        location: path, address or name, as the user gave it.
        path: the file; for arrays in a folder, the folder.
        settings: the config.json in its folder; empty without one.
        shapes, dtypes: name -> shape or dtype of each array, in the order of the file. Empty for a folder of
            transformers, whose own loader reads the weights.
        container: keys of the file under which the arrays are stored, joined by "/"; "" for the root.
        read: function that reads an array by its name.
        streams: an array takes memory only when it is read.
    """

    location: str
    path: Path
    settings: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    container: str = ""
    read: Callable[[str], torch.Tensor] = {}.__getitem__
    streams: bool = False


def fetch_any(location: str, where: Mapping[str, Any] | None = None) -> Fetched:
    """Find a local file or folder, or download it from an address or from the Hub.

    A file of a bucket, `gs://...`, is looked for in the mirrors of `HF_VIT_SOURCES`, in the bucket, and in the copies
    that the catalog knows; the first that has it is taken, and named in a warning if others refused.

    Args:
        location: path, address, or name of a model on the Hub.
        where: arguments of `snapshot_download`, such as `revision`, for a name on the Hub.

    Raises:
        SourceError: it does not exist or cannot be downloaded.
    """
    if location.startswith(f"{BUCKETS}/"):
        location = f"gs://{unquote(location.removeprefix(f'{BUCKETS}/'))}"
    if not location.startswith("gs://"):
        return _fetch_from(location, where or {})
    if is_folder_address(location):
        return fetch_folder(location)
    roots = [root.strip() for root in os.environ.get("HF_VIT_SOURCES", "").split(",") if root.strip()]
    mirrors = [f"{root.removesuffix('/')}/{location.removeprefix('gs://')}" for root in roots]
    copies, refusals = copies_of(location), []
    for source in dict.fromkeys((*mirrors, location, *copies)):
        try:
            fetched = _fetch_from(source, {})
        except UnavailableError as error:
            refusals.append(error)
            continue
        if refusals:
            lost = ", ".join(layers_missing_in(source))
            reasons = "; ".join(map(str, refusals))
            logger.warning(f"{reasons}; using {source} instead{f', which lacks the {lost}' if lost else ''}")
        return Fetched(location, fetched.path, fetched.sha256, source if source in copies else None)
    raise SourceError(f"{'; '.join(map(str, refusals))}; HF_VIT_SOURCES can name your own mirrors, separated by commas")


def _fetch_from(source: str, where: Mapping[str, Any]) -> Fetched:
    """Fetch a path, an address, `hf://owner/name/path` of a file on the Hub, or the model of that name on the Hub.

    Raises:
        UnavailableError: this source does not have it.
    """
    try:
        if source.startswith("hf://"):
            owner, name, file = source.removeprefix("hf://").split("/", 2)
            return Fetched(source, Path(hf_hub_download(f"{owner}/{name}", file)))
        if HUB_NAME.fullmatch(source) and not source.endswith(_SUFFIXES) and not Path(source).exists():
            folder = Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors"], **where))
            if not any(folder.glob("*.safetensors")):
                others = ["*.json", "*.bin", "*.npz", "*.msgpack"]
                folder = Path(snapshot_download(source, allow_patterns=others, **where))
            return Fetched(source, folder)
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnavailableError(f"there is no file {source}, and it cannot be loaded from the Hub: {reason}") from error
    return fetch(source)


@contextmanager
def open_checkpoint(fetched: Fetched, weights: str | None = None, variant: str | None = None) -> Iterator[Checkpoint]:
    """Open a checkpoint, read names and shapes of its arrays, and close it at the end of the block.

    Args:
        fetched: the file or folder.
        weights: which of several sets of weights to read, see `choose_weights`.
        variant: as in `checkpoint_in`.

    Raises:
        ValueError: the file is damaged, or the folder does not hold exactly one checkpoint.
        ImportError: a package that its container needs is not installed.
    """
    path = fetched.path
    if (path / "adapter_config.json").is_file():
        check_model_path(path)
    settings = {}
    if (path / "config.json").is_file():
        settings = read_json_object(path / "config.json")
    if path.is_dir() and tensorstore_folder(path) is None:
        path = checkpoint_in(path, settings, variant)
    elif variant is not None:
        raise ConversionError(f"{path.name} is one file, without variants; omit variant")
    path = tensorstore_folder(path) or path  # a file NAME-LAST refers to a folder
    _refuse_foreign(path)
    container = container_of(path)
    is_of_transformers = settings.get("model_type") not in (None, TIMM_WRAPPER)
    opened = Checkpoint(fetched.location, path, settings)
    if is_of_transformers and container not in ("msgpack", "tensorstore"):
        yield opened
    elif container in ("safetensors", "pickle"):
        arrays, key = read_arrays(path, weights)
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        dtypes = {name: str(array.dtype).removeprefix("torch.") for name, array in arrays.items()}
        yield replace(opened, shapes=shapes, dtypes=dtypes, container=key, read=arrays.__getitem__)
    else:
        with open_arrays(path) as reader:
            shapes = {name: array.shape for name, array in reader.arrays.items()}
            dtypes = {name: str(array.dtype).replace("|V2", "bfloat16") for name, array in reader.arrays.items()}
            yield replace(opened, shapes=shapes, dtypes=dtypes, read=reader.read, streams=True)


def _refuse_foreign(path: Path) -> None:
    """Raise ConversionError for a file that is known to hold no checkpoint."""
    if path.is_file():
        with path.open("rb") as file:
            beginning = file.read(8).lower()
        for start, kind in _FOREIGN.items():
            if beginning.startswith(start):
                raise ConversionError(f"{path.name} is {kind}")
        if path.suffix in _PROGRAM_SUFFIXES:
            raise ConversionError(
                f"{path.name} is a program without class names and preprocessing: give the model itself, or the folder "
                "of `hf-vit export MODEL FOLDER --to onnx` (or openvino)"
            )


def checkpoint_in(folder: Path, settings: dict[str, Any], variant: str | None = None) -> Path:
    """Return the weights of a folder with a config.json, of content `settings`; of any other, its only checkpoint.

    Args:
        variant: as in transformers, such as "fp16" for `model.fp16.safetensors`; None: the files without one.

    Raises:
        ConversionError: the folder does not hold exactly one checkpoint, or has no such variant.
    """
    for name in _WEIGHTS if settings else ():
        file = folder / name
        if variant is not None:
            file = file.with_name(f"{file.stem}.{variant}{file.suffix}")
        if file.is_file():
            return file
    if variant is not None:
        raise ConversionError(f"{folder} has no weights of the variant {variant}, such as model.{variant}.safetensors")
    candidates = set()
    for path in folder.iterdir():
        arrays = tensorstore_folder(path)
        if arrays or path.suffix in _SUFFIXES or (path.is_file() and is_msgpack(path)):
            candidates.add(arrays or path)
    if len(candidates) != 1:
        found = ", ".join(sorted(candidate.name for candidate in candidates)) or "none"
        kinds = f"{', '.join(_SUFFIXES)}, an Orbax or TensorStore folder"
        raise ConversionError(f"{folder} must hold one checkpoint ({kinds}); it holds {found}")
    return candidates.pop()


def open_arrays(path: Path) -> AbstractContextManager[NpzReader | MsgpackReader | TensorStoreReader]:
    """Open a file or folder of named arrays: a context manager with `arrays` (name -> description) and `read`.

    Raises:
        ValueError: it is damaged or holds no arrays.
        ImportError: a package that its kind needs is not installed.
    """
    container = container_of(path)
    if container == "tensorstore":
        return nullcontext(TensorStoreReader(path))
    return nullcontext(MsgpackReader(path)) if container == "msgpack" else NpzReader(path)
