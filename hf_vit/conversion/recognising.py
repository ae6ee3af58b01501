"""What a source is, seen from its content, and what reads it."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from ..files.download import Source, SourceError, fetch
from ..models.pretrained import HfViTPreTrainedModel
from ..models.upstream import is_of_transformers
from .jax.reading import read_jax
from .rules import ConversionError
from .torch.files import is_torch_file
from .torch.reading import read_torch
from .transformers.reading import read_transformers

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SUFFIXES = (".npz", ".safetensors", ".pth", ".pt", ".bin")
# Weights of a folder with a config.json, the better first.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def fetch_any(location: str) -> Source:
    """A file or folder here, behind an address, or the folder of a model on the Hub.

    Raises:
        SourceError: it does not exist or cannot be had.
    """
    is_name = HUB_NAME.fullmatch(location) and not location.endswith(SUFFIXES) and not Path(location).exists()
    return Source(location, _fetch_from_hub(location)) if is_name else fetch(location)


def _fetch_from_hub(name: str) -> Path:
    """The files of a model on the Hub that a conversion needs, in the Hub's cache."""
    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.bin", "*.npz"]))
        return folder
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SourceError(f"{name} is no file or folder here, and cannot be had from the Hub: {reason}") from error


def read_settings(path: Path) -> dict[str, Any]:
    """The config.json of a folder; empty for a file, or a folder without."""
    file = path / "config.json"
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text())
    except ValueError as error:
        raise ConversionError(f"{file} is not JSON: {error}") from error
    return settings if isinstance(settings, dict) else {}


def recognise_source(
    path: Path, settings: dict[str, Any], position_grid: tuple[int, int] | None
) -> tuple[Path, Callable[..., tuple[HfViTPreTrainedModel, dict[str, Any]]]]:
    """The file that identifies a checkpoint, and what reads it: takes overrides, returns the model and a record.

    Args:
        path: a file or a folder.
        settings: the config.json of the folder.
        position_grid: (rows, columns) of the table of positions.

    Raises:
        ConversionError: the folder does not hold one checkpoint that we can convert.
    """
    if is_of_transformers(settings):
        return _weights_in(path), partial(read_transformers, path, settings)
    if model_type := settings.get("model_type"):
        what = (
            "is in the format of hf_vit already" if model_type.startswith("hf_vit") else f"holds a {model_type} model"
        )
        raise ConversionError(f"{path} {what}; hf_vit converts vit, vit_mae, vit-hybrid and bit of transformers")
    file = path if path.is_file() else _checkpoint_in(path, has_settings=bool(settings))
    if is_torch_file(file):
        return file, partial(read_torch, file, position_grid, settings=settings)
    return file, partial(read_jax, file, position_grid)


def _weights_in(folder: Path) -> Path:
    found = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        raise ConversionError(f"{folder} has a config.json but no weights ({', '.join(WEIGHTS)})")
    return found


def _checkpoint_in(folder: Path, has_settings: bool) -> Path:
    if has_settings:
        return _weights_in(folder)
    candidates = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if len(candidates) != 1:
        found = ", ".join(candidate.name for candidate in candidates) or "none"
        raise ConversionError(f"{folder} must hold one checkpoint ({', '.join(SUFFIXES)}); it holds {found}")
    return candidates[0]
