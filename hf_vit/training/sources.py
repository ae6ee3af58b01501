"""Where a data set comes from: a Hub name, a folder or files, IDX files, or the digits that scikit-learn carries."""

import gzip
import struct
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.exceptions import DatasetGenerationError

from .folders import load_folder


def load_split(name: str, split: str, config: str | None = None, streaming: bool = False) -> Any:
    """Open one split of a data set: a `datasets.Dataset`, or an `IterableDataset` when streaming.

    Args:
        name: a Hub name, a folder of images / parquet / tars, a file, a glob, a folder of IDX files, or "digits".
        split: a name, or a slice of one such as "train[:98%]" (not when streaming).

    Raises:
        ValueError: in one sentence, when there is no such data or split.
    """
    if streaming and "[" in split:
        raise ValueError(f"split {split!r} is a slice, which a stream does not have; name a whole split")
    if name == "digits":
        return slice_split(load_digits(), split)
    path = Path(name).expanduser()
    if path.is_dir() and any(path.glob("*-images-idx3-ubyte*")):
        return slice_split(_load_idx_folder(path), split)
    try:
        reader = _reader_of(name)
        if reader["path"] == "imagefolder" and not streaming and (splits := load_folder(path)) is not None:
            return slice_split(splits, split)
        return datasets.load_dataset(**reader, name=config, split=split, streaming=streaming)
    except (ValueError, FileNotFoundError, DatasetGenerationError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"cannot read split {split!r} of {name}: {reason}") from error


def files_of_stream(name: str, config: str | None = None) -> dict[str, Any]:
    """The files of a data set on the Hub or in a folder, each with its commit, or its size and time of change."""
    builder = datasets.load_dataset_builder(**_reader_of(name), name=config)
    files: dict[str, Any] = {str(split): places for split, places in (builder.config.data_files or {}).items()}
    local = {place: Path(place).stat() for places in files.values() for place in places if Path(place).is_file()}
    return {
        "files": {split: [str(place) for place in places] for split, places in files.items()},
        "origin": {split: places.origin_metadata for split, places in files.items()},
        "local": {place: (found.st_size, found.st_mtime_ns) for place, found in local.items()},
        "builder": builder.hash,
    }


def _reader_of(name: str) -> dict[str, Any]:
    """Arguments of `datasets.load_dataset` for a name, by what is there and by its suffix."""
    path = Path(name).expanduser()
    if path.is_dir():
        for suffix, builder in (("parquet", "parquet"), ("tar", "webdataset")):
            if files := sorted(path.rglob(f"*.{suffix}")):
                return {"path": builder, "data_files": _files_by_split(files)}
        return {"path": "imagefolder", "data_dir": str(path)}
    files = sorted(path.parent.glob(path.name))
    if path.suffix in (".parquet", ".tar"):
        if not files:
            raise ValueError(f"there is no file {name}")
        return {"path": "parquet" if path.suffix == ".parquet" else "webdataset", "data_files": _files_by_split(files)}
    if path.is_absolute() or name.startswith((".", "~")):
        raise ValueError(f"there is no folder {name}")
    return {"path": name}


def _files_by_split(files: list[Path]) -> dict[str, list[str]]:
    """Files sorted into splits by the names the Hub goes by; a file that names no split is training data."""
    splits: dict[str, list[str]] = {}
    for file in files:
        named = [split for split in ("train", "validation", "test") if split in file.name or split == file.parent.name]
        splits.setdefault(named[0] if named else "train", []).append(str(file))
    return splits


def slice_split(splits: dict[str, datasets.Dataset], split: str) -> datasets.Dataset:
    """`train`, `train[:98%]` or `train[10:20]+test` of data sets in memory."""
    lengths = {name: len(dataset) for name, dataset in splits.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"no split {split!r}; there is {', '.join(lengths)} ({error})") from None
    pieces = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return pieces[0] if len(pieces) == 1 else datasets.concatenate_datasets(pieces)


def _from_arrays(images: np.ndarray, labels: np.ndarray, names: list[str]) -> datasets.Dataset:
    """(number, height, width) uint8 images and their class numbers as a data set of PNGs."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"image": list(images), "label": labels.tolist()}, features=features)


def load_digits() -> dict[str, datasets.Dataset]:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 grey, a fixed random 80 % of them for training.

    The file is ordered by writer: on its last fifth as it stands, writers are new and every method does worse.
    """
    from sklearn.datasets import load_digits as read_digits

    bunch = read_digits()
    images = np.round(bunch.images * 255 / 16).astype(np.uint8)  # pyright: ignore[reportAttributeAccessIssue]
    train, test = split_digits(len(images))
    names = [str(digit) for digit in range(10)]
    labels = np.asarray(bunch.target)  # pyright: ignore[reportAttributeAccessIssue]
    return {key: _from_arrays(images[rows], labels[rows], names) for key, rows in (("train", train), ("test", test))}


def split_digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of the training 80 % and of the held-out 20 %."""
    order = np.random.default_rng(0).permutation(count)
    return order[: count * 4 // 5], order[count * 4 // 5 :]


def _load_idx_folder(folder: Path) -> dict[str, datasets.Dataset]:
    """The splits of a folder in MNIST's format: `train-images-idx3-ubyte.gz`, `train-labels-idx1-ubyte.gz`, ..."""
    splits = {}
    for file in sorted(folder.glob("*-images-idx3-ubyte*")):
        stem = file.name.split("-images")[0]
        images = read_idx(file)
        labels = read_idx(file.with_name(file.name.replace("images-idx3", "labels-idx1")))
        if len(images) != len(labels):
            raise ValueError(f"{file} has {len(images)} images and {len(labels)} labels")
        names = [str(number) for number in range(int(labels.max()) + 1)]
        splits["test" if stem == "t10k" else stem] = _from_arrays(images, labels, names)
    return splits


def read_idx(file: Path) -> np.ndarray:
    """An IDX file: a big-endian magic whose last byte is the number of dimensions, their sizes, then bytes."""
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError) as error:
        raise ValueError(f"cannot read {file}: {error}") from None
    (magic,) = struct.unpack(">I", content[:4])
    shape = struct.unpack(f">{magic & 0xFF}I", content[4 : 4 + 4 * (magic & 0xFF)])
    if magic >> 8 != 8 or len(content) != 4 + 4 * len(shape) + int(np.prod(shape)):
        raise ValueError(f"{file} is not an IDX file of bytes, or is cut short")
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
