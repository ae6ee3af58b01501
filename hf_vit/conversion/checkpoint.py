"""An open checkpoint, before its source is recognised and its arrays are read."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from ..files.bucket import fetch_folder, is_folder_address
from ..files.containers import array_container, open_arrays
from ..files.download import Fetched, SourceError, fetch
from ..files.messages import kind_of_content, shorten
from ..files.reading import read_json_object
from ..models.utils import HUB_NAME, check_place
from .rules import ConversionError
from .torch_files import is_torch_file, read_arrays
from .transformers.names import is_of_transformers
from .unsupported import keras_model

_SUFFIXES = (".npz", ".safetensors", ".pth", ".pt", ".bin", ".msgpack")
# Weights in a folder with a config.json; the first that exists is used.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "flax_model.msgpack",
)


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint.

    Attributes:
        location: path, address or name, as the user gave it.
        path: the file; for arrays in a folder, the folder.
        settings: the config.json beside it; empty without one.
        shapes, dtypes: name -> shape or dtype of each array, in the order of the file. Empty for a folder of
            transformers, whose own loader reads the weights.
        container: key of the file under which the arrays are stored; "" for the root.
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

    Args:
        location: path, address, or name of a model on the Hub.
        where: arguments of `snapshot_download`, such as `revision`, for a name on the Hub.

    Raises:
        SourceError: it does not exist or cannot be downloaded.
    """
    is_name = HUB_NAME.fullmatch(location) and not location.endswith(_SUFFIXES) and not Path(location).exists()
    if is_name:
        return Fetched(location, _fetch_from_hub(location, where or {}))
    return fetch_folder(location) if is_folder_address(location) else fetch(location)


def _fetch_from_hub(name: str, where: Mapping[str, Any]) -> Path:
    """Download the files of a model on the Hub that a conversion needs; return the folder in the Hub's cache."""
    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], **where))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.bin", "*.npz", "*.msgpack"], **where))
        return folder
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SourceError(
            f"{name} is no local file or folder, and cannot be downloaded from the Hub: {reason}"
        ) from error


@contextmanager
def open_checkpoint(fetched: Fetched) -> Iterator[Checkpoint]:
    """Open a checkpoint, read names and shapes of its arrays, and close it at the end of the block.

    Raises:
        ConversionError: the file is damaged, or the folder does not hold exactly one checkpoint.
        ValueError: the .npz, .msgpack, or folder of arrays is damaged.
        ImportError: a package that its container needs is not installed.
    """
    path = fetched.path
    if keras := keras_model(path):
        raise ConversionError(keras)
    if path.is_file() and (kind := kind_of_content(_beginning(path))):
        raise ConversionError(f"{path.name} {kind}")
    settings = _read_settings(path)
    if (path / "adapter_config.json").is_file():
        check_place(path)
    if path.is_dir() and array_container(path) is None:
        path = _checkpoint_in(path, settings)
    arrays_at = array_container(path)
    if arrays_at is None and settings.get("model_type"):
        yield Checkpoint(fetched.location, path, settings)
    elif arrays_at is None and is_torch_file(path):
        arrays, container = read_arrays(path)
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        dtypes = {name: str(array.dtype).removeprefix("torch.") for name, array in arrays.items()}
        yield Checkpoint(fetched.location, path, settings, shapes, dtypes, container, arrays.__getitem__)
    else:
        with open_arrays(arrays_at or path) as reader:
            shapes = {name: array.shape for name, array in reader.arrays.items()}
            dtypes = {name: str(array.dtype).replace("|V2", "bfloat16") for name, array in reader.arrays.items()}
            yield Checkpoint(fetched.location, reader.path, settings, shapes, dtypes, "", reader.read, streams=True)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8)


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the config.json of a folder; an empty dictionary for a file, or a folder without one."""
    file = path / "config.json"
    if not file.is_file():
        return {}
    try:
        settings = read_json_object(file)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    if not isinstance(settings.get("model_type", ""), str):
        raise ConversionError(f"{file} has the model_type {shorten(settings['model_type'])} (expected a name)")
    return settings


def _checkpoint_in(folder: Path, settings: dict[str, Any]) -> Path:
    model_type = settings.get("model_type")
    if model_type and not is_of_transformers(settings):
        is_ours = model_type.startswith("hf_vit")
        what = "is in the format of hf_vit already" if is_ours else f"holds a {model_type} model"
        raise ConversionError(f"{folder} {what}; hf_vit converts vit, vit_mae, vit-hybrid and bit of transformers")
    found = [folder / name for name in _WEIGHTS if (folder / name).is_file()]
    if settings and found:
        return found[0]
    if model_type:
        raise ConversionError(f"{folder} has a config.json but no weights ({', '.join(_WEIGHTS)})")
    containers = {path: array_container(path) for path in folder.iterdir()}
    candidates = {container or path for path, container in containers.items() if container or path.suffix in _SUFFIXES}
    if len(candidates) != 1:
        found = ", ".join(sorted(candidate.name for candidate in candidates)) or "none"
        kinds = f"{', '.join(_SUFFIXES)}, an Orbax or TensorStore folder"
        raise ConversionError(f"{folder} must hold one checkpoint ({kinds}); it holds {found}")
    return candidates.pop()
