"""Content fingerprint of a model: equal for the same numbers in any container."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..catalog import address_of
from ..files.reading import read_json_object
from .checkpoint import fetch_any
from .converting import convert, fingerprint_of
from .jax.tables import original_rules
from .source import CONFIGURATIONS
from .tables import ConversionError


def fingerprint(source: str | Path, **options: Any) -> str:
    """Return the fingerprint of a model's content: one SHA-256, equal for the same numbers in any container.

    It covers names, shapes, dtypes and bytes of all arrays, in the layout of the original's files and in float32. An
    .npz, our folder, timm's .safetensors and transformers' folder of the same numbers have one fingerprint. An
    untrained head (all zero) is not part of it, since every conversion drops it. Settings (GELU, preprocessing) are no
    content.

    Args:
        source: as in `convert`, or a folder of hf_vit, here or on the Hub.
        options: as in `convert`, for a file that does not show its grid or heads.

    Raises:
        ValueError, OSError: as in `convert`.
    """
    location = address_of(str(source))
    if (folder := _folder_of_ours(location)) is None:
        model, _ = convert(source, **options)
        return (model.conversion_record or {})["fingerprint"]
    settings = read_json_object(folder / "config.json")
    config = CONFIGURATIONS[settings["model_type"]].from_dict(settings)
    with _open_weights(folder) as arrays:
        is_bare = not any(name.startswith(("vit.", "bit.")) for name in arrays)
        rules = original_rules(config, not is_bare, arrays)
        return fingerprint_of(rules, lambda name: arrays[name](name))


def _folder_of_ours(location: str) -> Path | None:
    """Return the folder of a model of hf_vit; None for anything else."""
    if "://" in location:
        return None
    path = fetch_any(location).path
    file = path / "config.json"
    is_ours = file.is_file() and read_json_object(file).get("model_type") in CONFIGURATIONS
    return path if is_ours else None


@contextmanager
def _open_weights(folder: Path) -> Iterator[dict[str, Callable[[str], torch.Tensor]]]:
    """Yield name -> function that reads it, of all .safetensors of a model, while the block runs."""
    index = folder / "model.safetensors.index.json"
    files = set(read_json_object(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    with ExitStack() as stack:
        arrays = {}
        for file in sorted(files):
            try:
                weights = stack.enter_context(safe_open(folder / Path(file).name, "pt"))
            except Exception as error:
                raise ConversionError(f"cannot read {folder / Path(file).name}: {error}") from error
            arrays |= dict.fromkeys(weights.keys(), weights.get_tensor)
        yield arrays
