"""From any source that we recognise to a model and its image processor."""

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from ..configuration_hf_vit import Size, as_pair
from ..image_processing_hf_vit import HfViTImageProcessor
from ..modeling_hf_vit import HfViTPreTrainedModel
from ..upstream_vit import is_upstream
from .jax_reading import read_jax
from .labels import read_labels
from .preprocessing import processor_for
from .record import package_versions
from .rules import ConversionError
from .sources import Source, SourceError, fetch, sha256_of
from .timm_layout import settings_of
from .torch_files import is_torch_file
from .torch_reading import read_torch
from .transformers_reading import read_transformers

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
SUFFIXES = (".npz", ".safetensors", ".pth", ".pt", ".bin")
# Weights of a folder with a config.json, the better first.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def convert(
    source: str | Path,
    *,
    labels: str | Path | list[str] | None = None,
    image_size: Size | None = None,
    position_grid: Size | None = None,
    **overrides: Any,
) -> tuple[HfViTPreTrainedModel, HfViTImageProcessor]:
    """Convert a checkpoint of the original family, or of one of its ports.

    What it is, is seen from its content: the original's .npz (vit_jax, big_vision); .safetensors, .pth, .pt or .bin of
    timm (ViT and hybrids), torchvision, DeiT, MAE or DINO; a folder of timm or of transformers' `vit`, `vit_mae` or
    `vit-hybrid`. The model computes with the numbers that the source computes with (GELU, epsilons).

    Args:
        source: a path, `https://...` or `gs://bucket/path` of a file, a folder that holds one, or a name on the Hub.
        labels: names of the classes: "imagenet1k", a file (a name per line, or JSON) or a list.
        image_size: resample the position embeddings to another size, an int or (height, width) in pixels.
        position_grid: (rows, columns) of the table of positions in the file; a square by default.
        overrides: fields of the configuration that no array shows, such as `pooling="none"`; for timm's and
            torchvision's files `num_attention_heads`, where the heads are not of 64 channels, and `hidden_act`.

    Returns:
        The model in evaluation mode: a classifier, or the bare encoder where the file has no trained head. And the
        image processor that does what the source did at evaluation. `model.conversion_record` says what was read;
        `save_pretrained` writes it to `conversion.json`.

    Raises:
        ValueError: the file is not a checkpoint that we can convert; one sentence says why.
        OSError: it cannot be fetched.
    """
    fetched = _fetch(str(source))
    settings = _read_settings(fetched.path)
    path, read = _recognise(fetched.path, settings, None if position_grid is None else as_pair(position_grid))
    with ThreadPoolExecutor(1) as executor:
        sha256 = executor.submit(sha256_of, path)  # hashing runs beside the reading
        model, record = read(**overrides)
        record = {"source": fetched.location, "file": path.name, "sha256": sha256.result(), **record}
    processor = processor_for(model.config, record["dialect"], path.parent, settings)
    if image_size is not None:
        model.set_image_size(image_size)
        record["image_size"] = image_size
        height, width = as_pair(image_size)
        processor.update(size={"height": height, "width": width}, crop_pct=None)
    if labels is not None:
        _set_labels(model, labels)
    model.conversion_record = {**record, "versions": package_versions()}
    return model, processor


def _fetch(location: str) -> Source:
    is_name = HUB_NAME.fullmatch(location) and not location.endswith(SUFFIXES) and not Path(location).exists()
    return Source(location, _fetch_from_hub(location)) if is_name else fetch(location)


def _fetch_from_hub(name: str) -> Path:
    """The files of a model on the Hub that a conversion needs, in the Hub's cache."""
    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.bin", "*.npz"]))
        return folder
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise SourceError(f"{name} is no file or folder here, and cannot be had from the Hub: {reason}") from error


def _read_settings(path: Path) -> dict[str, Any]:
    """The config.json of a folder; empty for a file, or a folder without."""
    file = path / "config.json"
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text())
    except ValueError as error:
        raise ConversionError(f"{file} is not JSON: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _recognise(
    path: Path, settings: dict[str, Any], position_grid: tuple[int, int] | None
) -> tuple[Path, Callable[..., tuple[HfViTPreTrainedModel, dict[str, Any]]]]:
    """The file that identifies the checkpoint, and what reads it."""
    if is_upstream(settings):
        return _weights_in(path), partial(read_transformers, path, settings)
    if model_type := settings.get("model_type"):
        what = "is in the format of hf_vit already" if model_type.startswith("hf_vit") else f"holds a {model_type} model"
        raise ConversionError(f"{path} {what}; hf_vit converts vit, vit_mae and vit-hybrid of transformers")
    file = path if path.is_file() else _checkpoint_in(path, has_settings=bool(settings))
    if is_torch_file(file):
        return file, partial(read_torch, file, position_grid, settings=settings_of(settings))
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


def _set_labels(model: HfViTPreTrainedModel, labels: str | Path | list[str]) -> None:
    if model.base_model is model:
        raise ConversionError("the checkpoint has no trained head, so labels cannot be given to its classes")
    names = labels if isinstance(labels, list) else read_labels(labels)
    if len(names) != model.config.num_labels:
        raise ConversionError(f"{len(names)} labels are given, but the head has {model.config.num_labels} classes")
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}
