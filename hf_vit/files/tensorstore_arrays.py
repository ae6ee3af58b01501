"""Reader for folders of arrays that JAX trainers write: Orbax (OCDBT, or one zarr array per parameter) and big_vision.

Opening a folder reads the metadata of its arrays only. An array's chunks are read with the array; the chunks of an
optimizer's state are never read.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .limits import MAX_ARRAYS, check_declared
from .npz import BFLOAT16, SUPPORTED_DTYPES, ArrayInfo, as_tensor
from .reading import read_json_object
from .versions import require

_DATABASE = "manifest.ocdbt"
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}  # metadata file of an array -> driver
_TREE = "_METADATA"  # Orbax's list of the keys of every parameter
_LATEST = "-LAST"  # big_vision's file NAME-LAST holds a step; the folder NAME-<step> holds the arrays


class TensorStoreError(ValueError):
    """A fault of a folder of arrays; the message names the folder."""


def tensorstore_folder(path: Path) -> Path | None:
    """Return the folder of arrays at a path, or the one that a file NAME-LAST refers to; None for anything else."""
    if path.is_file() and path.name.endswith(_LATEST):
        with open(path, "rb") as file:
            step = file.read(32).strip()
        path = path.with_name(path.name.removesuffix(_LATEST) + "-" + step.decode("latin-1"))
        return path if step.isdigit() and path.is_dir() else None
    metadata = (_DATABASE, *(f"*/{name}" for name in _DRIVERS))  # an array may have its own folder
    return path if path.is_dir() and any(any(path.glob(pattern)) for pattern in metadata) else None


class TensorStoreReader:
    """Reader of a folder of arrays, one array at a time.

    Attributes:
        arrays: name -> description of each numeric array. A name is the path of keys from the root, joined by slashes.

    Raises:
        TensorStoreError: the folder is damaged, holds no arrays, or exceeds a limit.
        ImportError: tensorstore is not installed.
    """

    def __init__(self, path: str | os.PathLike):
        require("tensorstore")
        import tensorstore

        self.path = Path(path)
        self.arrays: dict[str, ArrayInfo] = {}
        self._stores: dict[str, Any] = {}
        try:
            self._open(tensorstore)
        except Exception as error:  # tensorstore raises nearly anything for damaged bytes
            raise TensorStoreError(f"cannot read {path}: {_reason(error)}") from error
        if not self.arrays:
            raise TensorStoreError(f"{path} holds no arrays")

    def read(self, name: str) -> torch.Tensor:
        """Read one array into its own memory.

        Raises:
            TensorStoreError: a chunk is damaged or missing.
        """
        try:
            array = self._stores[name].read().result()
        except ValueError as error:
            raise TensorStoreError(f"cannot read the array {name!r} of {self.path}: {_reason(error)}") from error
        array = np.require(array, requirements=["C", "W"])
        if self.arrays[name].dtype == BFLOAT16:
            array = array.view(BFLOAT16)
        return as_tensor(array)

    def _open(self, tensorstore: Any) -> None:
        tree = read_json_object(self.path / _TREE) if (self.path / _TREE).is_file() else {}
        context, stored = tensorstore.Context(), list(self._stored_arrays(tensorstore))
        if len(stored) > MAX_ARRAYS:
            raise ValueError(f"it holds {len(stored):,} arrays; at most {MAX_ARRAYS:,} are read")
        opening = []
        for name, metadata, store in stored:
            spec = {"driver": _DRIVERS[metadata], "kvstore": {**store, "path": f"{store['path']}{name}/"}}
            opening.append(tensorstore.open(spec, read=True, open=True, context=context))
        names = _names_in(tree)
        separator = "~" if any("~" in name for name, *_ in stored) else "."
        for (name, *_), future in zip(stored, opening, strict=True):
            self._add(names.get(name, name.replace(separator, "/")), future.result(), tensorstore, tree)
        size = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        check_declared("it", sum(array.nbytes for array in self.arrays.values()), size)  # before any chunk is read

    def _stored_arrays(self, tensorstore: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield (stored name, name of its metadata file, key-value store) for every array."""
        store = {"driver": "file", "path": f"{self.path.resolve().as_posix()}/"}
        if (self.path / _DATABASE).is_file():
            store = {"driver": "ocdbt", "base": store, "path": ""}
        for key in sorted(tensorstore.KvStore.open(store).result().list().result()):
            name, _, metadata = key.decode().rpartition("/")
            if metadata in _DRIVERS:
                yield name, metadata, store

    def _add(self, name: str, store: Any, tensorstore: Any, tree: dict[str, Any]) -> None:
        dtype = BFLOAT16 if store.dtype.name == "bfloat16" else store.dtype.numpy_dtype
        if dtype not in SUPPORTED_DTYPES:
            return
        has_all_chunks = store.fill_value is None or tree.get("store_array_data_equal_to_fill_value", False)
        if has_all_chunks:  # by default, tensorstore reads a missing chunk as zeros
            store = tensorstore.open({**store.spec().to_json(), "fill_missing_data_reads": False}).result()
        chunk = store.chunk_layout.write_chunk.shape or store.shape
        whole = (math.ceil(size / part) * part if part else size for size, part in zip(store.shape, chunk, strict=True))
        self.arrays[name] = ArrayInfo(tuple(store.shape), dtype, math.prod(whole) * dtype.itemsize)
        self._stores[name] = store


def _names_in(tree: dict[str, Any]) -> dict[str, str]:
    """Map each parameter's stored name to its keys joined by slashes; a key may contain a dot."""
    entries = tree.get("tree_metadata", {}).values()
    keys = [[str(key["key"]) for key in entry["key_metadata"]] for entry in entries]
    return {".".join(parts): "/".join(parts) for parts in keys}


def _reason(error: BaseException) -> str:
    """Return tensorstore's message without the appended specification."""
    return str(error).split(" [", 1)[0] or type(error).__name__
