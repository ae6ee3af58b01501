"""Feature files: names of images, their features, and the fingerprint of the model."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ..files.output import new_file
from ..files.predictions import Table

SUFFIXES = (".parquet", ".npz", ".csv")
_KEY = b"hf_vit"  # key in the metadata of a parquet file
_ROWS = 8192  # rows that are read at once, and of a row group
Write = Callable[[list[str], np.ndarray], None]


@contextmanager
def new_features(path: Path, about: dict[str, Any], overwrite: bool) -> Iterator[Write]:
    """Return a function that writes batches of names and features to a file; the file appears at the end, complete.

    Args:
        path: file to write; the suffix sets its format, one of `SUFFIXES`.
        about: name and fingerprint of the model; a .csv does not store it.
        overwrite: replace an existing file.
    """
    opener = {".parquet": _open_parquet, ".npz": _open_npz, ".csv": _open_csv}[path.suffix.lower()]
    names: list[str] = []
    batches: list[np.ndarray] = []
    with new_file(path, overwrite) as draft, opener(draft, about) as write_rows:

        def flush() -> None:
            if names:
                write_rows(list(names), np.concatenate(batches))
            names.clear()
            batches.clear()

        def write(its_names: list[str], features: np.ndarray) -> None:
            names.extend(its_names)
            batches.append(features)
            if len(names) >= _ROWS:
                flush()

        yield write
        flush()


@contextmanager
def _open_parquet(path: Path, about: dict[str, Any]) -> Iterator[Write]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with ExitStack() as opened:
        writers = []

        def write(names: list[str], features: np.ndarray) -> None:
            width = features.shape[1]
            schema = pa.schema({"file": pa.string(), "features": pa.list_(pa.float32(), width)})
            # bytes of a name that are not UTF-8 are written as \udcNN
            files = [name.encode(errors="backslashreplace").decode() for name in names]
            rows = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1), pa.float32()), width)
            table = pa.table([files, rows], schema=schema.with_metadata({_KEY: json.dumps(about)}))
            if not writers:
                writers.append(opened.enter_context(pq.ParquetWriter(path, table.schema)))
            writers[0].write_table(table)

        yield write


@contextmanager
def _open_npz(path: Path, about: dict[str, Any]) -> Iterator[Write]:
    """Write at the end: all features are in memory, also when the file is read."""
    files: list[str] = []
    chunks: list[np.ndarray] = []

    def write(names: list[str], features: np.ndarray) -> None:
        files.extend(names)
        chunks.append(features)

    yield write
    with open(path, "wb") as file:
        np.savez(file, files=np.array(files), about=np.array(json.dumps(about)), features=np.concatenate(chunks))


@contextmanager
def _open_csv(path: Path, about: dict[str, Any]) -> Iterator[Write]:
    with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        tables: list[Table] = []

        def write(names: list[str], features: np.ndarray) -> None:
            if not tables:
                tables.append(Table(file, ["file", *(f"feature_{number}" for number in range(features.shape[1]))]))
            tables[0].extend([name, *row] for name, row in zip(names, features.tolist(), strict=True))

        yield write


class Features:
    """Reader of a file of `new_features`: name and fingerprint of the model (`about`), image `names` and `chunks`.

    Raises:
        ValueError: it is not such a file.
        FileNotFoundError: the file does not exist.
    """

    def __init__(self, path: Path):
        self._path = path
        self._is_parquet = path.suffix.lower() == ".parquet"
        if not self._is_parquet and path.suffix.lower() != ".npz":
            raise ValueError(f"cannot search {path}: expected features in a .parquet or .npz file of `hf-vit embed`")
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
        try:
            about, self.names = self._open()
            self.about = {key: str(about[key]) for key in ("model", "sha256")}
        except (ValueError, KeyError, OSError, TypeError, BadZipFile) as error:
            raise ValueError(f"{path} is not a file of features that `hf-vit embed` wrote") from error

    def _open(self) -> tuple[dict[str, Any], list[str]]:
        if self._is_parquet:
            import pyarrow.parquet as pq

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
        if not self._is_parquet:
            with np.load(self._path, allow_pickle=False) as arrays:
                features = arrays["features"]
            yield from (features[start : start + _ROWS] for start in range(0, len(features), _ROWS))
            return
        import pyarrow.parquet as pq

        with pq.ParquetFile(self._path) as file:
            for batch in file.iter_batches(_ROWS, columns=["features"]):
                yield batch["features"].flatten().to_numpy().reshape(len(batch), -1)
