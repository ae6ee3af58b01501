"""Feature files: image names, features, and the fingerprint of the model."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ..files.output import new_file
from ..files.predictions import Table
from ..models.utils import parse_json

SUFFIXES = (".parquet", ".npz", ".csv")
_KEY = b"hf_vit"  # key in the metadata of a parquet file
_ROWS = 8192  # rows of a row group, and of a chunk that is read
Batches = Iterable[tuple[list[str], np.ndarray]]  # names of images, and their features (images, features)


def write_features(path: Path, about: dict[str, Any], batches: Batches, overwrite: bool) -> tuple[int, int]:
    """Write batches of names and features to a file, which appears only when it is complete.

    Args:
        path: file to write; the suffix sets its format, one of `SUFFIXES`.
        about: name and fingerprint of the model, and how JPEGs were decoded; a .csv does not store it.
        batches: the batches, at least one.
        overwrite: replace an existing file.

    Returns:
        The number of images, and of features of each.
    """
    write = {".parquet": _write_parquet, ".npz": _write_npz, ".csv": _write_csv}[path.suffix.lower()]
    with new_file(path, overwrite) as draft:
        return write(draft, about, batches)


def _write_parquet(path: Path, about: dict[str, Any], batches: Batches) -> tuple[int, int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer, count, width = None, 0, 0
    with ExitStack() as opened:
        for names, features in _row_groups(batches):
            count, width = count + len(names), features.shape[1]
            types = {"file": pa.string(), "features": pa.list_(pa.float32(), width)}
            schema = pa.schema(types, {_KEY: json.dumps(about)})
            writer = writer or opened.enter_context(pq.ParquetWriter(path, schema))
            # bytes of a name that are not UTF-8 are written as \udcNN
            files = [name.encode(errors="backslashreplace").decode() for name in names]
            rows = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1), pa.float32()), width)
            writer.write_table(pa.table([files, rows], schema=schema))
    return count, width


def _row_groups(batches: Batches) -> Iterator[tuple[list[str], np.ndarray]]:
    """Join batches to at least 8192 images each, except the last."""
    names, features = [], []
    for its_names, its_features in batches:
        names += its_names
        features.append(its_features)
        if len(names) >= _ROWS:
            yield names, np.concatenate(features)
            names, features = [], []
    if names:
        yield names, np.concatenate(features)


def _write_npz(path: Path, about: dict[str, Any], batches: Batches) -> tuple[int, int]:
    names, parts = zip(*batches, strict=True)
    features = np.concatenate(parts)
    with open(path, "wb") as file:
        np.savez(file, files=np.concatenate(names), about=np.array(json.dumps(about)), features=features)
    return features.shape


def _write_csv(path: Path, about: dict[str, Any], batches: Batches) -> tuple[int, int]:
    table, count, width = None, 0, 0
    with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        for names, features in batches:
            count, width = count + len(names), features.shape[1]
            table = table or Table(file, ["file", *(f"feature_{number}" for number in range(width))])
            table.extend([name, *row] for name, row in zip(names, features.tolist(), strict=True))
    return count, width


class Features:
    """Reader of a file of `write_features`: the model and the decoder (`about`), image `names` and `chunks`.

    Raises:
        ValueError: it does not exist, or is not such a file.
    """

    def __init__(self, path: Path):
        self._path, self._is_parquet = path, path.suffix.lower() == ".parquet"
        try:
            about, self.names = self._open()
            self.about = {key: str(about[key]) for key in ("model", "sha256")}
            self.about["jpeg_dct"] = str(about.get("jpeg_dct", "accurate"))  # missing in older files
        except (FileNotFoundError, PermissionError):
            raise
        except (ValueError, KeyError, OSError, TypeError, BadZipFile) as error:
            raise ValueError(f"{path} is damaged, or not a .parquet or .npz of `hf-vit embed`") from error

    def _open(self) -> tuple[dict[str, Any], list[str]]:
        if self._is_parquet:
            import pyarrow.parquet as pq

            with pq.ParquetFile(self._path) as file:
                about = parse_json(file.schema_arrow.metadata[_KEY].decode(), str(self._path))
                return about, file.read(columns=["file"])["file"].to_pylist()
        with open(self._path, "rb") as file, np.load(file) as arrays:  # on an error np.load may leave a file open
            return parse_json(str(arrays["about"]), str(self._path)), arrays["files"].tolist()

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

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the features (numbers, features) of some images, whose numbers ascend."""
        found, start = [], 0
        for chunk in self.chunks():
            inside = (numbers >= start) & (numbers < start + len(chunk))
            found.append(chunk[numbers[inside] - start])
            start += len(chunk)
        return np.concatenate(found)
