"""Feature files: image names, features, and the fingerprint of the model."""

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
_ROWS = 8192  # rows of a row group, and of a chunk that is read
Write = Callable[[list[str], np.ndarray], None]


@contextmanager
def new_features(path: Path, about: dict[str, Any], overwrite: bool) -> Iterator[Write]:
    """Yield a function that writes batches of names and features to a file, which appears only when it is complete.

    Args:
        path: file to write; the suffix sets its format, one of `SUFFIXES`.
        about: name and fingerprint of the model; a .csv does not store it.
        overwrite: replace an existing file.
    """
    suffix = path.suffix.lower()
    open_rows = {".parquet": _open_parquet, ".npz": _open_npz, ".csv": _open_csv}[suffix]
    names: list[str] = []
    batches: list[np.ndarray] = []
    writers: list[Write] = []
    with new_file(path, overwrite) as draft, ExitStack() as opened:

        def flush() -> None:
            features = np.concatenate(batches)
            if not writers:
                writers.append(open_rows(draft, about, features.shape[1], opened))
            writers[0](list(names), features)
            names.clear()
            batches.clear()

        def write(new_names: list[str], features: np.ndarray) -> None:
            names.extend(new_names)
            batches.append(features)
            if len(names) >= _ROWS and suffix != ".npz":  # an .npz is written and read as a whole
                flush()

        yield write
        if names:
            flush()


def _open_parquet(path: Path, about: dict[str, Any], width: int, opened: ExitStack) -> Write:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema({"file": pa.string(), "features": pa.list_(pa.float32(), width)}, {_KEY: json.dumps(about)})
    writer = opened.enter_context(pq.ParquetWriter(path, schema))

    def write(names: list[str], features: np.ndarray) -> None:
        # bytes of a name that are not UTF-8 are written as \udcNN
        files = [name.encode(errors="backslashreplace").decode() for name in names]
        rows = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1), pa.float32()), width)
        writer.write_table(pa.table([files, rows], schema=schema))

    return write


def _open_npz(path: Path, about: dict[str, Any], width: int, opened: ExitStack) -> Write:
    def write(names: list[str], features: np.ndarray) -> None:
        with open(path, "wb") as file:
            np.savez(file, files=np.array(names), about=np.array(json.dumps(about)), features=features)

    return write


def _open_csv(path: Path, about: dict[str, Any], width: int, opened: ExitStack) -> Write:
    options: Any = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}
    file = opened.enter_context(open(path, "w", **options))  # noqa: SIM115 - closed with the others
    table = Table(file, ["file", *(f"feature_{number}" for number in range(width))])
    return lambda names, features: table.extend(
        [name, *row] for name, row in zip(names, features.tolist(), strict=True)
    )


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
            raise ValueError(f"cannot read {path}: it is not a feature file that `hf-vit embed` wrote") from error

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
