"""Export of a model into a copy of its original file, with the file's other arrays (such as a text tower)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...catalog import address_of
from ...files.download import Fetched, sha256_at
from ...files.npz import write_npz
from ...models.configuration_hf_vit import HfViTConfig, as_pair
from ..checkpoint import Checkpoint, fetch_any, open_checkpoint
from ..recognition import recognise
from ..source import JaxSource, Model, Naming, Request, record_of
from ..tables import ConversionError
from .tables import POSITIONS


def export_beside(model: Model, path: Path, beside: str) -> None:
    """Write a copy of the checkpoint `beside` as .npz, with the arrays of `model` instead of its own.

    Names, order, stacking and dtypes are those of `beside`. Its other arrays are copied, one at a time.

    Args:
        model: the model.
        path: the .npz to write.
        beside: path or address of the checkpoint that the model was converted from.

    Raises:
        ConversionError: the model was not converted from `beside`, or `beside` holds another architecture.
    """
    fetched = fetch_any(address_of(beside))
    with open_checkpoint(fetched) as checkpoint:
        source, naming = recognise(checkpoint, Request(_stored_grid(model.config), None, {}))
        if not isinstance(source, JaxSource):
            raise ConversionError(
                f"{checkpoint.path.name} is no checkpoint of the original JAX code; give the original"
            )
        _check_record(record_of(model), fetched, checkpoint, naming)
        if not isinstance(model, source.models):
            raise ConversionError(f"{checkpoint.path.name} holds no {type(model).__name__}")
        arrays = dict(source.arrays(model, naming.dialect))  # views, no copies
        _check_arrays(model, arrays, checkpoint, naming)
        write_npz(path, _merge(arrays, checkpoint, naming))


def _stored_grid(config: Any) -> tuple[int, int] | None:
    """Return (rows, columns) of the positions in the file, before any resampling."""
    if not isinstance(config, HfViTConfig):
        return None
    if config.is_flexible:
        return config.stored_grid
    return config.grid_of(*as_pair((config.image_size_history or [config.image_size])[0]))


def _check_record(record: Mapping[str, Any], fetched: Fetched, checkpoint: Checkpoint, naming: Naming) -> None:
    """Refuse a file that the model was not converted from, by the sha256 (or else the dialect) in the record."""
    if not record:
        return
    file, origin = checkpoint.path.name, record.get("file", "another file")
    if "sha256" in record:
        sha256 = fetched.sha256 or sha256_at(checkpoint.path)
        if sha256 != record["sha256"]:
            raise ConversionError(
                f"{file} (sha256 {sha256[:16]}...) does not fit: the model was converted from {origin} (sha256 "
                f"{record['sha256'][:16]}...); give that file"
            )
    elif record.get("dialect") != naming.dialect:
        raise ConversionError(
            f"{file} does not fit: its dialect is {naming.dialect}, but the model was converted from {origin} with "
            f"{record.get('dialect')}"
        )


def _check_arrays(model: Model, arrays: Mapping[str, torch.Tensor], checkpoint: Checkpoint, naming: Naming) -> None:
    """Refuse a model whose arrays differ from the file's; only resampled positions may have another shape."""
    shapes = {name: checkpoint.shapes[stored.name] for name, stored in naming.arrays.items()}
    shapes |= {name: shapes[name][1:] for name, stored in naming.arrays.items() if stored.index is not None}
    problems = [f"the model has no {name}" for name in shapes if name not in arrays]
    problems += [f"the file has no {name}" for name in arrays if name not in shapes]
    may_differ = {POSITIONS} if getattr(model.config, "image_size_history", None) else set()
    problems += [
        f"{name} has shape {shapes[name]} in the file, {tuple(array.shape)} in the model"
        for name, array in arrays.items()
        if name in shapes and name not in may_differ and tuple(array.shape) != shapes[name]
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ConversionError(f"{checkpoint.path.name} does not fit: {'; '.join(problems[:3])}{more}")


def _merge(
    arrays: Mapping[str, torch.Tensor], checkpoint: Checkpoint, naming: Naming
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, array) of the whole file in its order; the model's arrays replace their originals, in their dtype.

    Raises:
        ConversionError: a value is too large for the dtype.
    """
    own: dict[str, list[tuple[int | None, str]]] = {}
    for name, stored in naming.arrays.items():
        own.setdefault(stored.name, []).append((stored.index, name))
    for stored_name in checkpoint.shapes:
        if stored_name not in own:
            yield stored_name, checkpoint.read(stored_name)
            continue
        (index, name), *_ = places = sorted(own[stored_name])
        array = arrays[name] if index is None else torch.stack([arrays[one] for _, one in places])
        dtype = checkpoint.dtypes[stored_name]
        array = array.to(getattr(torch, dtype, array.dtype))
        if not torch.isfinite(array).all():
            raise ConversionError(
                f"cannot write {stored_name}: it has values that are not finite in the file's dtype, {dtype}"
            )
        yield stored_name, array
