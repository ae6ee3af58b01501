"""Feature files: names of images, their features, and the identity of the model."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from ..files.output import new_file
from ..files.predictions import Table

SUFFIXES = (".parquet", ".npz", ".csv")
_KEY = b"hf_vit"  # key in the metadata of a parquet file
_ROWS = 8192  # rows per read and per row group
Write = Callable[[list[str], np.ndarray], None]


@contextmanager
def new_features(path: Path, about: dict[str, Any], overwrite: bool) -> Iterator[Write]:
    """Return a function that writes batches of names and features to a file; the file appears at the end, complete.

    Args:
        path: file to write; the suffix sets its format, one of `SUFFIXES`.
        about: identity of the model; a .csv does not store it.
        overwrite: replace an existing file.
    """
    makers = {".parquet": _parquet_writer, ".npz": _npz_writer, ".csv": _csv_writer}
    with new_file(path, overwrite) as draft, makers[path.suffix.lower()](draft, about) as write:
        yield write


@contextmanager
def _parquet_writer(path: Path, about: dict[str, Any]) -> Iterator[Write]:
    pa, pq = import_pyarrow(path.name)
    writers: list[Any] = []
    waiting: list[tuple[list[str], np.ndarray]] = []

    def write_waiting() -> None:
        """Write one row group."""
        names = [_as_utf8(name) for these, _ in waiting for name in these]
        features = np.concatenate([these for _, these in waiting])
        width = features.shape[1]
        rows = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1), pa.float32()), width)
        schema = pa.schema({"file": pa.string(), "features": pa.list_(pa.float32(), width)})
        table = pa.table([names, rows], schema=schema.with_metadata({_KEY: json.dumps(about)}))
        if not writers:
            writers.append(pq.ParquetWriter(path, table.schema))
        writers[0].write_table(table)
        waiting.clear()

    def write(names: list[str], features: np.ndarray) -> None:
        waiting.append((names, features))
        if sum(len(these) for these, _ in waiting) >= _ROWS:
            write_waiting()

    try:
        yield write
        if waiting:
            write_waiting()
    finally:
        for writer in writers:
            writer.close()


@contextmanager
def _npz_writer(path: Path, about: dict[str, Any]) -> Iterator[Write]:
    """Write what `np.savez` would write, with one batch of features in memory."""
    files, shape = list[str](), (0, 0)
    with TemporaryFile(dir=path.parent) as numbers:

        def write(names: list[str], features: np.ndarray) -> None:
            nonlocal shape
            files.extend(names)
            shape = (len(files), features.shape[1])
            numbers.write(features.astype("<f4").tobytes())

        yield write
        numbers.seek(0)
        with ZipFile(path, "w") as archive:
            for name, array in (("files", np.array(files)), ("about", np.array(json.dumps(about)))):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
            with archive.open("features.npy", "w", force_zip64=True) as member:
                header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(member, header)
                shutil.copyfileobj(numbers, member)


@contextmanager
def _csv_writer(path: Path, about: dict[str, Any]) -> Iterator[Write]:
    with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        tables: list[Table] = []

        def write(names: list[str], features: np.ndarray) -> None:
            if not tables:
                tables.append(Table(file, ["file", *(f"feature_{number}" for number in range(features.shape[1]))]))
            tables[0].extend([name, *row] for name, row in zip(names, features.tolist(), strict=True))

        yield write


def _as_utf8(name: str) -> str:
    r"""Write bytes of a file name that are not UTF-8 as \udcNN, since parquet has UTF-8 only."""
    return name.encode(errors="backslashreplace").decode()


class Features:
    """Reader of a file that `new_features` wrote: identity of the model (`about`), image `names` and `chunks`.

    Raises:
        ValueError: it is not such a file.
        FileNotFoundError: the file does not exist.
    """

    def __init__(self, path: Path):
        self._path = path
        if path.suffix.lower() not in (".parquet", ".npz"):
            raise ValueError(f"cannot search {path}: expected features in a .parquet or .npz file of `hf-vit embed`")
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
        try:
            about, self.names = self._open()
            self.about = {key: str(about[key]) for key in ("model", "sha256")}
        except (ValueError, KeyError, OSError, TypeError, BadZipFile) as error:
            raise ValueError(f"{path} is not a file of features that `hf-vit embed` wrote") from error

    def _open(self) -> tuple[dict[str, Any], list[str]]:
        if self._path.suffix.lower() == ".parquet":
            _, pq = import_pyarrow(self._path.name)
            with pq.ParquetFile(self._path) as file:
                about = json.loads(file.schema_arrow.metadata[_KEY])
                return about, file.read(columns=["file"])["file"].to_pylist()
        with (
            open(self._path, "rb") as file,
            np.load(file, allow_pickle=False) as arrays,
        ):  # on an error np.load may leave it open
            return json.loads(str(arrays["about"])), arrays["files"].tolist()

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield arrays (images, features) of float32, at most 8192 images each; a .npz is read as a whole."""
        if self._path.suffix.lower() == ".npz":
            with np.load(self._path, allow_pickle=False) as arrays:
                features = arrays["features"]
            yield from (features[start : start + _ROWS] for start in range(0, len(features), _ROWS))
            return
        _, pq = import_pyarrow(self._path.name)
        with pq.ParquetFile(self._path) as file:
            for batch in file.iter_batches(_ROWS, columns=["features"]):
                yield batch["features"].flatten().to_numpy().reshape(len(batch), -1)


def import_pyarrow(name: str) -> tuple[Any, Any]:
    """Return pyarrow and its module for parquet files.

    Args:
        name: name of the file that needs it, for the message.

    Raises:
        ImportError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        install = "pip install 'hf_vit[training]', or use a .npz file"
        raise ImportError(f"{name} needs pyarrow, which is not installed: {install}") from error
    return pyarrow, pyarrow.parquet
