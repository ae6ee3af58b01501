"""Feature files, and folders of parts: image names, features, and the fingerprint of the model."""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ..files.json_files import parse_json
from ..files.output import new_file
from ..files.predictions import Table

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
    """Reader of a file of `write_features`, or of the parts of a job: the features of its readable images.

    `about` has the model and the decoder of JPEGs, and of a job its fingerprints.

    Raises:
        ValueError: it does not exist, or has no features.
    """

    def __init__(self, path: Path):
        self._path = path
        self._files = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
        self._is_parquet = path.is_dir() or path.suffix.lower() == ".parquet"
        try:
            if not self._files:
                raise ValueError("there are no parts")
            found = [self._open(file) for file in self._files]
            about = found[0][0]
            self.about = {key: str(about[key]) for key in ("model", "sha256")}
            self.about["jpeg_dct"] = str(about.get("jpeg_dct", "accurate"))  # missing in older files
            self.fingerprints: dict[str, str] = about.get("fingerprints", {})
        except (FileNotFoundError, PermissionError):
            raise
        except (ValueError, KeyError, OSError, TypeError, BadZipFile) as error:
            expected = "a .parquet, .npz or folder of parts of `hf-vit embed`"
            raise ValueError(f"{path} is damaged, or not {expected}") from error
        self._ends = np.cumsum([count for _, count in found])

    def _open(self, file: Path) -> tuple[dict[str, Any], int]:
        """Return what a file says about its model, and the number of its readable images."""
        if self._is_parquet:
            import pyarrow.parquet as pq

            with pq.ParquetFile(file) as parquet:
                about = parse_json(parquet.schema_arrow.metadata[_KEY].decode(), str(file))
                parquet.schema_arrow.field("features")
                return about, parquet.metadata.num_rows - about.get("unreadable", 0)
        with open(file, "rb") as content, np.load(content) as arrays:  # on an error np.load may leave a file open
            return parse_json(str(arrays["about"]), str(file)), len(arrays["files"])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def chunks(self) -> Iterator[np.ndarray]:
        """Yield arrays (images, features) of float32, at most 8192 images each; a .npz is read as a whole."""
        if not self._is_parquet:
            features = self._load("features")
            yield from (features[start : start + _ROWS] for start in range(0, len(features), _ROWS))
            return
        for _, batch in self._read(["features"]):
            yield batch["features"].flatten().to_numpy().reshape(len(batch), -1)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the features (numbers, features) of some images, whose numbers ascend."""
        if not self._is_parquet:
            return self._load("features")[numbers]
        found = []
        for start, batch in self._read(["features"], numbers):
            inside = numbers[(numbers >= start) & (numbers < start + len(batch))]
            features = batch["features"].flatten().to_numpy().reshape(len(batch), -1)
            found.append(features[inside - start])
        return np.concatenate(found)

    def names(self, numbers: np.ndarray | None = None) -> dict[int, str]:
        """Return the names of images by their numbers; None: of all."""
        if not self._is_parquet:
            names = dict(enumerate(self._load("files").tolist()))
            return names if numbers is None else {number: names[number] for number in numbers.tolist()}
        found: dict[int, str] = {}
        for start, batch in self._read(["file"], numbers):
            inside = np.arange(start, start + len(batch))
            if numbers is not None:
                inside = np.intersect1d(inside, numbers)
            found |= zip(inside.tolist(), batch["file"].take(inside - start).to_pylist(), strict=True)
        return found

    def _load(self, name: str) -> np.ndarray:
        with np.load(self._path, allow_pickle=False) as arrays:
            return arrays[name]

    def _read(self, columns: list[str], numbers: np.ndarray | None = None) -> Iterator[tuple[int, Any]]:
        """Yield (number of the first image, record batch) of the readable images; only files that hold some numbers."""
        import pyarrow.parquet as pq

        first = 0
        for file, end in zip(self._files, self._ends.tolist(), strict=True):
            if numbers is None or ((numbers >= first) & (numbers < end)).any():
                start = first
                with pq.ParquetFile(file) as parquet:
                    has_errors = "error" in parquet.schema_arrow.names
                    for batch in parquet.iter_batches(_ROWS, columns=columns + ["error"] * has_errors):
                        readable = batch.filter(batch["error"].is_null()) if has_errors else batch
                        yield start, readable
                        start += len(readable)
            first = end
