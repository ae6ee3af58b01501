"""Arrays of a folder as JAX trainers write it: Orbax (OCDBT, or a zarr array for each parameter) and big_vision.

Opening a folder reads the metadata of its arrays; their chunks are read with each array, and those of an optimiser
never.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .limits import HOW_TO_ALLOW, MAX_ARRAYS, allowed, most_bytes
from .npz import BFLOAT16, SUPPORTED_DTYPES, ArrayInfo
from .reading import read_json_object

_DATABASE = "manifest.ocdbt"
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # by the metadata of an array
_TREE = "_METADATA"  # of Orbax: the keys of every parameter
_LATEST = "-LAST"  # big_vision's NAME-LAST holds the step, and NAME-<step> the arrays


class TensorStoreError(ValueError):
    """What is wrong with a folder of arrays, in one sentence that names it."""


def tensorstore_folder(path: Path) -> Path | None:
    """The folder of arrays that a folder, or a file NAME-LAST, is or leads to; None for anything else."""
    if path.is_file() and path.name.endswith(_LATEST):
        with open(path, "rb") as file:
            step = file.read(32).strip()
        path = path.with_name(path.name.removesuffix(_LATEST) + "-" + step.decode("latin-1"))
        return path if step.isdigit() and path.is_dir() else None
    if path.is_dir() and ((path / _DATABASE).is_file() or any(_arrays_below(path))):
        return path
    return None


def _arrays_below(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, name of its metadata) of every array that has a folder of its own."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        for metadata in _DRIVERS:
            if entry.is_dir() and os.path.isfile(os.path.join(entry.path, metadata)):
                yield entry.name, metadata


class TensorStoreReader:
    """Reads a folder array by array.

    A context manager.

    Attributes:
        arrays: what each array is, by its keys from the root with slashes between them. What is no numeric array is
            left out.

    Raises:
        TensorStoreError: the folder is damaged, holds no arrays, or more than is read.
        ImportError: tensorstore is not installed.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            import tensorstore
        except ImportError as error:
            raise ImportError(f"{path} needs tensorstore: pip install 'hf_vit[jax-checkpoints]'") from error
        self.path = Path(path)
        self.arrays: dict[str, ArrayInfo] = {}
        self._stores: dict[str, Any] = {}
        try:
            self._open(tensorstore)
        except TensorStoreError:
            raise
        except (ValueError, TypeError, KeyError) as error:  # what tensorstore raises for damaged bytes
            raise TensorStoreError(f"{path} is damaged: {_reason(error)}") from error
        if not self.arrays:
            raise TensorStoreError(f"{path} holds no arrays")

    def __enter__(self) -> "TensorStoreReader":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stores.clear()

    def read(self, name: str) -> torch.Tensor:
        """Read one array into memory of its own.

        Raises:
            TensorStoreError: a chunk is damaged or missing.
        """
        try:
            array = self._stores[name].read().result()
        except ValueError as error:
            raise TensorStoreError(f"{self.path}: the array {name!r} cannot be read: {_reason(error)}") from error
        is_bfloat16 = self.arrays[name].dtype == BFLOAT16
        tensor = torch.from_numpy(np.require(array.view(np.int16) if is_bfloat16 else array, requirements=["C", "W"]))
        return tensor.view(torch.bfloat16) if is_bfloat16 else tensor

    def _open(self, tensorstore: Any) -> None:
        tree = read_json_object(self.path / _TREE) if (self.path / _TREE).is_file() else {}
        context, places = tensorstore.Context(), list(self._places(tensorstore))
        if len(places) > MAX_ARRAYS:
            raise TensorStoreError(f"{self.path} holds {len(places):,} arrays; at most {MAX_ARRAYS:,} are read")
        opening = []
        for name, metadata, store in places:
            spec = {"driver": _DRIVERS[metadata], "kvstore": {**store, "path": f"{store['path']}{name}/"}}
            opening.append(tensorstore.open(spec, read=True, open=True, context=context))
        names = _names_in(tree) if tree else {}
        separator = "~" if any("~" in name for name, *_ in places) else "."
        for (name, *_), future in zip(places, opening, strict=True):
            self._add(names.get(name, name.replace(separator, "/")), future.result(), tensorstore, tree)
        self._check_sizes()

    def _places(self, tensorstore: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(stored name, name of its metadata, key-value store) of every array."""
        folder = f"{self.path.resolve().as_posix()}/"
        if not (self.path / _DATABASE).is_file():
            for name, metadata in _arrays_below(self.path):
                yield name, metadata, {"driver": "file", "path": folder}
            return
        database = {"driver": "ocdbt", "base": {"driver": "file", "path": folder}, "path": ""}
        for key in tensorstore.KvStore.open(database).result().list().result():
            name, _, metadata = key.decode().rpartition("/")
            if metadata in _DRIVERS:
                yield name, metadata, database

    def _add(self, name: str, store: Any, tensorstore: Any, tree: dict[str, Any]) -> None:
        dtype = BFLOAT16 if store.dtype.name == "bfloat16" else store.dtype.numpy_dtype
        if dtype not in SUPPORTED_DTYPES:
            return
        if name in self.arrays:
            raise TensorStoreError(f"{self.path} holds two arrays of the name {name!r}")
        has_all_chunks = store.fill_value is None or tree.get("store_array_data_equal_to_fill_value", False)
        if has_all_chunks:  # one that is missing would be read as zeros
            store = tensorstore.open({**store.spec().to_json(), "fill_missing_data_reads": False}).result()
        chunk = store.chunk_layout.write_chunk.shape or store.shape
        whole = (math.ceil(size / part) * part if part else size for size, part in zip(store.shape, chunk, strict=True))
        self.arrays[name] = ArrayInfo(name, tuple(store.shape), dtype, math.prod(whole) * dtype.itemsize)
        self._stores[name] = store

    def _check_sizes(self) -> None:
        """Refuse more than the folder can plausibly hold, before any chunk is read."""
        size = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        declared = sum(array.nbytes for array in self.arrays.values())
        most = most_bytes(size)
        if declared > most and not allowed("large"):
            raise TensorStoreError(
                f"{self.path} declares {declared:,} bytes of arrays in {size:,}; at most {most:,} {HOW_TO_ALLOW}"
            )


def _names_in(tree: dict[str, Any]) -> dict[str, str]:
    """The keys of every parameter, with slashes between them, by its stored name; a key may hold a dot."""
    try:
        keys = [[str(key["key"]) for key in entry["key_metadata"]] for entry in tree["tree_metadata"].values()]
    except (TypeError, LookupError, AttributeError):
        raise ValueError(f"{_TREE} does not list the keys of every parameter") from None
    return {".".join(parts): "/".join(parts) for parts in keys}


def _reason(error: BaseException) -> str:
    """What tensorstore says, without the specification that it repeats."""
    return str(error).split(" [", 1)[0] or type(error).__name__
