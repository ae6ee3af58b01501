"""Sources of data sets (a Hub name, a folder or files, IDX files, scikit-learn's digits), and their columns."""

import glob
import gzip
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.config import HF_DATASETS_CACHE, REPOYAML_FILENAME
from datasets.exceptions import DatasetGenerationError
from datasets.naming import camelcase_to_snakecase
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError

from ..files.download import filesystem_of
from ..files.limits import MAX_ARRAYS, allowed, check_limit
from ..files.messages import did_you_mean, shorten
from ..files.reading import read_yaml
from ..models.utils import redact_secrets
from .folders import find_table, load_folder, load_table

_TEXT = ("string", "large_string")
# Types of lists of labels.
_LISTED = (*_TEXT, "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
_BUILDERS = {".parquet": "parquet", ".tar": "webdataset"}  # suffix -> builder of `datasets`
_NO_IMAGES = {"", ".arrow", ".csv", ".json", ".jsonl", ".lock", ".md", ".tsv", ".txt"}  # suffixes of other files
_EXPECTED = "a folder with images in CLASS/FILE or a labels.csv, or .parquet or .tar files"
_VALIDATION = re.compile(r"\b(val|valid|dev)\b")  # other names of this split
_IDX_IMAGES = "*-images-idx3-ubyte*"  # files of MNIST's format
_MAX_IDX_BYTES = 2**28  # unpacked; the images of MNIST have 47 MB


def load_split(name: str, split: str, config: str | None = None, streaming: bool = False) -> Any:
    """Open one split of a data set: a `datasets.Dataset`, or the names of its shards when streaming.

    Args:
        name: a Hub name, a folder of images (with a labels.csv if they may have several labels), of parquet or tar
            files, or of IDX files, a file, a glob, "digits", or the address of shards with a glob or a range in it,
            such as "s3://bucket/train-{0000..0146}.tar".
        split: a name, or a slice such as "train[:98%]" (not of shards). "val", "valid" and "dev" mean "validation" if
            the data set has no split of that name.
        config: configuration of a Hub data set.
        streaming: read parquet and tar files in place; always so for addresses.

    Raises:
        ValueError: there is no such data set or split, or its rows name files outside of its folder; the message is one
            sentence.
    """
    if found := _VALIDATION.search(split):
        names = names_of_splits(name, config)
        if found[0] not in names and "validation" in names:
            split = _VALIDATION.sub("validation", split)
    with _errors_about(f"split {split!r} of {name}"):
        splits, loading = _find(name)
        if "://" in name or (streaming and loading and loading["path"] != "imagefolder"):
            if splits is None:
                splits = datasets.load_dataset_builder(name=config, **loading).config.data_files or {}
            return _shards_of(splits, split)
        if not loading:
            return slice_split(splits, split)
        samples: Any = datasets.load_dataset(name=config, split=split, **loading)
        if samples.info.builder_name != "imagefolder":  # whose paths come from a listing, not from the data
            path = Path(name).expanduser()
            folder = None if splits is None else path if path.is_dir() else path.parent
            for column, feature in samples.features.items():
                if is_image(feature) or is_image_struct(feature):
                    check_image_paths(samples.data.column(column), column, folder)
        return samples


@contextmanager
def _errors_about(what: str) -> Iterator[None]:
    """Raise the errors of a data set as a ValueError of one line, without secrets."""
    try:
        yield
    except (ValueError, OSError, ImportError, OverflowError, DatasetGenerationError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        if "TAR archives" in reason:
            reason += " Images of several formats need --streaming."
        raise ValueError(redact_secrets(f"cannot read {what}: {reason}")) from error


def _find(name: str) -> tuple[Any, dict[str, Any]]:
    """Find a data set by its name.

    Returns:
        Its data sets, or the names of its shards, by split; None if only `datasets` knows them. And the arguments with
        which `datasets` loads it; none if it is opened or remote.
    """
    path = Path(name).expanduser()
    if name == "digits":
        return load_digits(), {}
    if "://" in name:
        return _find_remote(name), {}
    if not path.is_dir():
        if path.suffix not in _BUILDERS:
            if path.is_file():
                raise ValueError(f"a file of this kind is no data set (expected {_EXPECTED})")
            _require_on_hub(name)
            return None, {"path": name}
        files = [path] if path.is_file() else sorted(path.parent.glob(path.name))
        if not files:
            raise ValueError(f"there is no file {name}")
        return _local_shards(files)
    if any(path.glob(_IDX_IMAGES)):
        return _load_idx_folder(path), {}
    if (table := find_table(path)) is not None:
        return load_table(table), {}
    for suffix in _BUILDERS:
        if files := sorted(path.rglob(f"*{suffix}")):
            return _local_shards(files)
    if splits := load_folder(path):
        return splits, {}
    if all(file.suffix.lower() in _NO_IMAGES for file in path.rglob("*") if file.is_file()):
        raise ValueError(f"it has no images (expected {_EXPECTED}; a data set of save_to_disk: use to_parquet)")
    return None, {"path": "imagefolder", "data_dir": str(path)}


def _local_shards(files: list[Path]) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return parquet or tar files by split, and the arguments with which `datasets` loads them."""
    shards = _files_by_split([file.as_posix() for file in files])
    escaped = {split: [glob.escape(name) for name in names] for split, names in shards.items()}  # `a[1].parquet`
    return shards, {"path": _BUILDERS[files[0].suffix], "data_files": escaped}


def check_image_paths(images: pa.ChunkedArray, column: str, folder: Path | None = None) -> None:
    """Check that images without bytes are files in the folder of the data set; None: all must have bytes.

    Other paths could name any file or device of this machine.

    Raises:
        ValueError: an image has only another path.
    """
    unread = (chunk.field("path").filter(chunk.field("bytes").is_null()) for chunk in images.chunks)
    for path in (path for paths in unread for path in paths.drop_null().to_pylist()):
        if folder is None or not os.path.abspath(path).startswith(os.path.abspath(folder) + os.sep):
            raise ValueError(
                f"an image of column {column} has no bytes, only the path {shorten(path)} (expected its bytes, or "
                "without streaming a file in the folder of the data set)"
            )


def names_of_splits(name: str, config: str | None = None) -> list[str]:
    """Return the names of the splits of a data set that `load_split` can open.

    Raises:
        ValueError: there is no such data set; the message is one sentence.
    """
    path = Path(name).expanduser()
    if path.is_dir() and (files := sorted(path.glob(_IDX_IMAGES))):
        return [_split_of_idx(file) for file in files]  # decoding them takes long
    with _errors_about(name):
        splits, loading = _find(name)
        if splits is None:
            builder = datasets.load_dataset_builder(name=config, **loading)
            splits = builder.config.data_files or builder.info.splits or ()
        return [str(split) for split in splits]


def _shards_of(files: Mapping[str, Sequence[str]], split: str) -> list[str]:
    """The shards of one split."""
    shards = [str(file) for key, names in files.items() for file in names if str(key) == split]
    if not shards:
        raise ValueError(f"the splits, which cannot be sliced, are {', '.join(map(str, files)) or 'none'}")
    kinds = {file.rpartition(".")[2] for file in shards}
    if kinds not in ({"tar"}, {"parquet"}):
        raise ValueError(
            f"its files are {', '.join(sorted(kinds))} (expected only parquet, or only tar); load it without streaming"
        )
    return shards


def _find_remote(name: str) -> dict[str, list[str]]:
    """Remote shards by split, of an address with ranges and stars, or of a folder."""
    found: list[str] = []
    for address in _expand(name):
        if not address.endswith((".tar", ".parquet")):
            address = f"{address.rstrip('/')}/**"
        if "*" in address:
            filesystem, pattern = filesystem_of(address)
            names = [str(path) for path in filesystem.glob(pattern)]
            found += [filesystem.unstrip_protocol(path) for path in names if path.endswith((".tar", ".parquet"))]
        else:
            found.append(address)
    return _files_by_split(found)


def _expand(address: str) -> list[str]:
    """Return an address for each number of a range in braces, {000..146}, as in a shell."""
    found = [address]
    while found and (match := re.search(r"\{(\d+)\.\.(\d+)\}", found[0])):
        first, last = match.groups()
        if len(found) * (int(last) - int(first) + 1) > MAX_ARRAYS:
            raise ValueError(f"{redact_secrets(address)} expands to more than {MAX_ARRAYS:,} shards")
        numbers = [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
        found = [rest.replace(match.group(), number, 1) for rest in found for number in numbers]
    return found


def _require_on_hub(name: str) -> None:
    """Raise ValueError if there is no data set of this name on the Hub, or in the cache if the Hub cannot be reached.

    `datasets` itself repeats its requests for half a minute where there is no network.
    """
    path = Path(name).expanduser()
    hint = did_you_mean(path.name, os.listdir(path.parent) if path.parent.is_dir() else [])
    if not re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name):
        raise ValueError(f"there is no folder {name}{hint}")
    api = HfApi(library_name="hf_vit")
    try:
        info = api.dataset_info(name, timeout=10)
    except Exception as error:  # of several HTTP libraries
        is_missing = isinstance(error, RepositoryNotFoundError)
        folder = "___".join([*name.split("/")[:-1], camelcase_to_snakecase(path.name)])
        if is_missing or not Path(HF_DATASETS_CACHE, folder).is_dir():
            reason = "no such data set on the Hub" if is_missing else "the Hub cannot be reached"
            raise ValueError(f"there is no folder {name} here, and {reason}{hint}") from None
        return
    # `datasets` would open any address, and any file of this machine, that the metadata of a data set names.
    configs = [(info.card_data or {}).get("configs")]
    if any(file.rfilename == REPOYAML_FILENAME for file in info.siblings or ()):
        metadata = read_yaml(api.hf_hub_download(name, REPOYAML_FILENAME, repo_type="dataset"))
        configs.append(metadata.get("configs") if isinstance(metadata, dict) else None)
    if outside := re.search(r'"(?:/|~|\.\.|[^"]*(?:://|/\.\.))[^"]*', json.dumps(configs, default=str)):
        raise ValueError(f"its metadata names the file {shorten(outside[0][1:])}, which is not in the data set")


def _files_by_split(files: Sequence[str]) -> dict[str, list[str]]:
    """Sort files into splits by their names, as the Hub does; other files are training data."""
    splits: dict[str, list[str]] = {}
    for file in files:
        *_, folder, name = ["", *file.split("/")]
        named = [split for split in ("train", "validation", "test") if split in name or split == folder]
        splits.setdefault(named[0] if named else "train", []).append(file)
    return splits


def slice_split(splits: dict[str, datasets.Dataset], split: str) -> datasets.Dataset:
    """Return `train`, `train[:98%]` or `train[10:20]+test` of opened data sets.

    Raises:
        ValueError: there is no such split.
    """
    lengths = {name: len(dataset) for name, dataset in splits.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"there is no split {split!r}, only {', '.join(lengths)} ({error})") from None
    pieces = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return pieces[0] if len(pieces) == 1 else datasets.concatenate_datasets(pieces)


def _from_arrays(images: np.ndarray, labels: np.ndarray, names: list[str]) -> datasets.Dataset:
    """Convert (number, height, width) uint8 images and their class numbers to a data set of PNGs."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"image": list(images), "label": labels.tolist()}, features=features)


@cache
def load_digits() -> dict[str, datasets.Dataset]:
    """Load the 1,797 handwritten digits of scikit-learn, 8 x 8 gray; a fixed random 80% are for training.

    The original order is by writer. Its last fifth has other writers, which is a harder test.
    """
    from sklearn.datasets import load_digits as read_digits

    bunch = read_digits()
    images = np.round(bunch.images * 255 / 16).astype(np.uint8)  # pyright: ignore[reportAttributeAccessIssue]
    train, test = split_digits(len(images))
    names = [str(digit) for digit in range(10)]
    labels = np.asarray(bunch.target)  # pyright: ignore[reportAttributeAccessIssue]
    return {key: _from_arrays(images[rows], labels[rows], names) for key, rows in (("train", train), ("test", test))}


def split_digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row numbers of the 80% for training and of the other 20%."""
    order = np.random.default_rng(0).permutation(count)
    return order[: count * 4 // 5], order[count * 4 // 5 :]


def _load_idx_folder(folder: Path) -> dict[str, datasets.Dataset]:
    """Load the splits of a folder in MNIST's format: `train-images-idx3-ubyte.gz`, `train-labels-idx1-ubyte.gz`, ..."""
    splits = {}
    for file in sorted(folder.glob(_IDX_IMAGES)):
        images = read_idx(file)
        labels = read_idx(file.with_name(file.name.replace("images-idx3", "labels-idx1")))
        names = [str(number) for number in range(int(labels.max()) + 1)]
        splits[_split_of_idx(file)] = _from_arrays(images, labels, names)
    return splits


def _split_of_idx(file: Path) -> str:
    stem = file.name.split("-images")[0]
    return "test" if stem == "t10k" else stem


def read_idx(file: Path) -> np.ndarray:
    """Read an IDX file: a big-endian magic number whose last byte is the number of dimensions, their sizes, then bytes.

    Raises:
        ValueError: the file cannot be read, or is not a whole IDX file.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
            content = stream.read(-1 if allowed("large") else _MAX_IDX_BYTES + 1)
        check_limit("it unpacks to more bytes", len(content), _MAX_IDX_BYTES)
        (magic,) = struct.unpack(">I", content[:4])
        shape = struct.unpack(f">{magic & 0xFF}I", content[4 : 4 + 4 * (magic & 0xFF)])
        if magic >> 8 != 8:
            raise ValueError("not an IDX file of bytes")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (OSError, EOFError, ValueError, zlib.error, struct.error) as error:
        raise ValueError(f"cannot read {file}: {error}") from None


def is_image(feature: Any) -> bool:
    """Return whether a column has images."""
    return isinstance(feature, datasets.Image)


def is_image_struct(feature: Any) -> bool:
    """Return whether a column has what an image column stores, without its type: bytes and paths."""
    return isinstance(feature, dict) and feature.keys() == {"bytes", "path"}


def is_text(feature: Any) -> bool:
    """Return whether a column has text."""
    return isinstance(feature, datasets.Value) and feature.dtype in _TEXT


def is_list_of(feature: Any, kind: type) -> bool:
    """Return whether a column has lists of `kind`."""
    return isinstance(feature, datasets.List | datasets.LargeList) and isinstance(feature.feature, kind)


def find_column(features: Mapping[str, Any], name: str | None, fits: Callable[[Any], bool], what: str) -> str:
    """Return the column called `name`; without a name, the only column that fits.

    Args:
        what: kind of the column, "image" or "label", in the message.

    Raises:
        ValueError: there is no such column, or not exactly one fits; the message lists the columns.
    """
    if name is not None:
        if name not in features:
            raise ValueError(f"there is no column {name!r}; the columns are {', '.join(features)}")
        return name
    found = [column for column, feature in features.items() if fits(feature)]
    if len(found) != 1:
        several = f"there are {len(found)} columns of type {what}: choose one with --{what}-column"
        count = several if found else f"there is no column of type {what}"
        raise ValueError(f"{count}; the columns are {_listing(features)}")
    return found[0]


# Kinds of label columns; without a name, a column of the first kind that exists is taken.
_LABELS: tuple[Callable[[Any], bool], ...] = (
    lambda feature: isinstance(feature, datasets.ClassLabel),
    lambda feature: is_list_of(feature, datasets.ClassLabel),
    lambda feature: isinstance(feature, datasets.Value) and "int" in feature.dtype,
    lambda feature: is_list_of(feature, datasets.Value) and feature.feature.dtype in _LISTED,
)


def find_label_column(features: Mapping[str, Any], name: str | None) -> str:
    """Return the column called `name`.

    By default that of class labels, else of lists of them, else of integers, else of lists of names or integers, else
    a column of text called "label".

    Raises:
        ValueError: there is no such column, or not exactly one, or it has no labels.
    """
    if name is None:
        for is_label in _LABELS:
            if any(map(is_label, features.values())):
                return find_column(features, None, is_label, "label")
        if not is_text(features.get("label")):
            raise no_classes(features)
        return "label"
    feature = features[find_column(features, name, is_text, "label")]
    is_other = is_text(feature) or feature == datasets.Value("bool")
    if not is_other and not any(is_label(feature) for is_label in _LABELS):
        raise ValueError(f"the column {name} has no class labels; the columns are {_listing(features)}")
    return name


def no_classes(features: Mapping[str, Any]) -> ValueError:
    """Return the error for images without labels."""
    return ValueError(
        f"the images have no classes (columns: {_listing(features)}); make a folder of images for each of two classes "
        "or more (FOLDER/CLASS/IMAGE), or name a column with --label-column"
    )


def _listing(features: Mapping[str, Any]) -> str:
    """Return the columns with their types."""
    return ", ".join(
        f"{name} ({feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__})"
        for name, feature in features.items()
    )
