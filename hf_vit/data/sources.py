"""Sources of datasets: a Hub name, a folder or files, IDX files, scikit-learn's digits."""

import glob
import gzip
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
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

from ..files.addresses import redact_secrets
from ..files.download import filesystem_of
from ..files.limits import MAX_ARRAYS, allowed, check_limit
from ..files.messages import did_you_mean, format_error, join_names, shorten
from ..files.reading import read_yaml
from .columns import is_image, is_image_struct
from .folders import SHARD_SUFFIXES, load_folder
from .layout import SPLIT_NAMES, arrange_files, resolve_split

_BUILDERS = {".parquet": "parquet", ".tar": "webdataset"}  # suffix -> builder of `datasets`
_EXPECTED = "a folder with images in CLASS/FILE or a labels.csv, or .parquet or .tar files"
_IDX_IMAGES = "*-images-idx3-ubyte*"  # files of MNIST's format
_MAX_IDX_BYTES = 2**28  # unpacked; the images of MNIST have 47 MB


@dataclass
class Source:
    """The splits of a dataset.

    Args:
        name: as the user named it.
        splits: of each split the opened images, or the names of its shards; of a dataset on the Hub nothing.
        sources: of each split the user's folders or files.
        unused: names of what is not used, by reason.
        loading: arguments with which `datasets` loads shards and datasets of the Hub; none for the others.
        is_folder: whether it is a folder of images, whose rows are sorted by path.
    """

    name: str
    splits: Mapping[str, Any]
    sources: dict[str, list[str]] = field(default_factory=dict)
    unused: dict[str, list[str]] = field(default_factory=dict)
    loading: dict[str, Any] = field(default_factory=dict)
    is_folder: bool = False

    def load(self, split: str, streaming: bool = False) -> Any:
        """Open one split, as `load_split`."""
        with _errors_about(f"split {split!r} of {self.name}"):
            split = self.resolve(split)
            if "://" in self.name or (streaming and self.loading):
                splits = self.splits or datasets.load_dataset_builder(**self.loading).config.data_files or {}
                return _shards_of(splits, split)
            if self.splits:
                self._require(split)
            if not self.loading:
                return slice_split(self.splits, split)
            samples: Any = datasets.load_dataset(split=split, **self.loading)
            if samples.info.builder_name != "imagefolder":  # whose paths come from a listing, not from the data
                path = Path(self.name).expanduser()
                folder = path if path.is_dir() else path.parent
                for column, feature in samples.features.items():
                    if is_image(feature) or is_image_struct(feature):
                        check_image_paths(samples.data.column(column), column, folder if self.splits else None)
            return samples

    def resolve(self, split: str) -> str:
        """Return a name or slice with the names of this dataset: "val[:3]+test" becomes "validation[:3]+test"."""
        parts = [part.strip() for part in split.split("+")]
        names = [part.partition("[")[0] for part in parts]
        if not self.splits and all(name in SPLIT_NAMES for name in names):  # of the Hub, which need not be asked
            return split
        return "+".join(
            resolve_split(name, self.names) + part.removeprefix(name) for name, part in zip(names, parts, strict=True)
        )

    @cached_property
    def names(self) -> list[str]:
        """Return the names of the splits."""
        if self.splits:
            return list(self.splits)
        builder = datasets.load_dataset_builder(**self.loading)
        return [str(split) for split in builder.config.data_files or builder.info.splits or ()]

    def _require(self, split: str) -> None:
        for part in split.split("+"):
            name = part.partition("[")[0].strip()
            if name not in self.splits:
                raise unknown_split(name, self.sources or {key: [] for key in self.splits})


def unknown_split(name: str, sources: dict[str, list[str]]) -> ValueError:
    """Return the error for a split that does not exist; it names the user's folders."""
    found = [f"{split} ({join_names(folders, 3)})" if any(folders) else split for split, folders in sources.items()]
    return ValueError(f"there is no split {name!r}, only {', '.join(found)}")


def open_source(
    name: str, config: str | None = None, layout: str | None = None, label_column: str | None = None
) -> Source:
    """Find the splits of a dataset.

    Args:
        name: a Hub name, a folder of images (with a labels.csv if they may have several labels), of parquet or tar
            files, or of IDX files, a file, a glob, "digits", or the address of shards with a glob or a range in it,
            such as "s3://bucket/train-{0000..0146}.tar".
        config: configuration of a Hub dataset.
        layout: as in `layout.arrange`.
        label_column: the column of a table that the user names.

    Raises:
        ValueError: there is no such dataset, or it can be read in two ways; the message is one sentence.
    """
    with _errors_about(name):
        source = _find(name, layout, label_column)
    if source.loading and config is not None:
        source.loading["name"] = config
    return source


def load_split(
    name: str, split: str, config: str | None = None, streaming: bool = False, layout: str | None = None
) -> Any:
    """Open one split of a dataset: a `datasets.Dataset`, or the names of its shards when streaming.

    Args:
        name, config, layout: as in `open_source`.
        split: a name, or a slice such as "train[:98%]" (not of shards). Names that mean the same split may be
            exchanged: "val" and "validation".
        streaming: read parquet and tar files in place; always so for addresses.

    Raises:
        ValueError: there is no such dataset or split, or its rows name files outside of its folder; the message is one
            sentence.
    """
    return open_source(name, config, layout).load(split, streaming)


def names_of_splits(name: str, config: str | None = None, layout: str | None = None) -> list[str]:
    """Return the names of the splits of a dataset that `load_split` can open.

    Raises:
        ValueError: there is no such dataset; the message is one sentence.
    """
    source = open_source(name, config, layout)
    with _errors_about(name):
        return source.names


@contextmanager
def _errors_about(what: str) -> Iterator[None]:
    """Raise the errors of a dataset as a ValueError of one line, without secrets."""
    try:
        yield
    except (ValueError, OSError, ImportError, OverflowError, DatasetGenerationError) as error:
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())
        if isinstance(cause, ImportError):
            reason = format_error(cause)  # names the extra
        if "TAR archives" in reason:
            reason += " Images of several formats need --streaming."
        raise ValueError(redact_secrets(f"cannot read {what}: {reason}")) from error


def _find(name: str, layout: str | None, label_column: str | None) -> Source:
    """Find a dataset by its name."""
    path = Path(name).expanduser()
    if name == "digits":
        return Source(name, load_digits())
    if "://" in name:
        return Source(name, *_find_remote(name, layout))
    if not path.is_dir():
        if path.suffix not in SHARD_SUFFIXES:
            if path.is_file():
                raise ValueError(f"a file of this kind is no dataset (expected {_EXPECTED})")
            _require_on_hub(name)
            return Source(name, {}, loading={"path": name})
        files = [path] if path.is_file() else sorted(path.parent.glob(path.name))
        if not files:
            raise ValueError(f"there is no file {name}")
        splits, sources = _sort_shards([file.as_posix() for file in files], f"{path.parent}/", name, layout)
        return Source(name, splits, sources, loading=_loading_of(splits, path.suffix))
    if any(path.glob(_IDX_IMAGES)):
        return Source(name, _IdxFolder(path))
    splits, sources, unused, suffix = load_folder(path, name, layout, label_column)
    if suffix is not None:
        return Source(name, splits, sources, unused, _loading_of(splits, suffix))
    return Source(name, splits, sources, unused, is_folder=True)


def _loading_of(splits: dict[str, list[str]], suffix: str) -> dict[str, Any]:
    """Return the arguments with which `datasets` loads parquet or tar files."""
    escaped = {split: [glob.escape(name) for name in names] for split, names in splits.items()}  # `a[1].parquet`
    return {"path": _BUILDERS[suffix.lower()], "data_files": escaped}


def _sort_shards(
    files: Sequence[str], root: str, title: str, layout: str | None
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return files by split, and their short names by split.

    Args:
        root: beginning of the names, which counts for no split.
    """
    short = [
        file.removeprefix(root).lstrip("/") if file.startswith(root) else file.rpartition("/")[2] for file in files
    ]
    numbers = arrange_files(short, title, layout)
    splits = {split: [files[number] for number in found] for split, found in numbers.items()}
    sources = {split: [short[number] for number in found] for split, found in numbers.items()}
    return splits, sources


def check_image_paths(images: pa.ChunkedArray, column: str, folder: Path | None = None) -> None:
    """Check that images without bytes are files in the folder of the dataset; None: all must have bytes.

    Other paths could name any file or device of this machine.

    Raises:
        ValueError: an image has only another path.
    """
    unread = (chunk.field("path").filter(chunk.field("bytes").is_null()) for chunk in images.chunks)
    for path in (path for paths in unread for path in paths.drop_null().to_pylist()):
        if folder is None or not os.path.abspath(path).startswith(os.path.abspath(folder) + os.sep):
            raise ValueError(
                f"an image of column {column} has no bytes, only the path {shorten(path)} (expected its bytes, or "
                "without streaming a file in the folder of the dataset)"
            )


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


def _find_remote(name: str, layout: str | None) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Sort remote shards into splits as `_sort_shards`, of an address with ranges and stars, or of a folder."""
    found: list[str] = []
    root = re.split(r"[*{]", name)[0]
    if not name.endswith(SHARD_SUFFIXES) and "*" not in name:
        root = f"{root.rstrip('/')}/"
    for address in expand_braces(name):
        if not address.endswith((".tar", ".parquet")):
            address = f"{address.rstrip('/')}/**"
        if "*" in address:
            filesystem, pattern = filesystem_of(address)
            names = [str(path) for path in filesystem.glob(pattern)]
            found += [filesystem.unstrip_protocol(path) for path in names if path.endswith((".tar", ".parquet"))]
        else:
            found.append(address)
    return _sort_shards(found, root[: root.rfind("/") + 1], redact_secrets(name), layout)


def expand_braces(address: str) -> list[str]:
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
    """Raise ValueError if there is no dataset of this name on the Hub, or in the cache if the Hub cannot be reached.

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
            reason = "no such dataset on the Hub" if is_missing else "the Hub cannot be reached"
            raise ValueError(f"there is no folder {name} here, and {reason}{hint}") from None
        return
    # `datasets` would open any address, and any file of this machine, that the metadata of a dataset names.
    configs = [(info.card_data or {}).get("configs")]
    if any(file.rfilename == REPOYAML_FILENAME for file in info.siblings or ()):
        metadata = read_yaml(api.hf_hub_download(name, REPOYAML_FILENAME, repo_type="dataset"))
        configs.append(metadata.get("configs") if isinstance(metadata, dict) else None)
    if outside := re.search(r'"(?:/|~|\.\.|[^"]*(?:://|/\.\.))[^"]*', json.dumps(configs, default=str)):
        raise ValueError(f"its metadata names the file {shorten(outside[0][1:])}, which is not in the dataset")


def slice_split(splits: Mapping[str, datasets.Dataset], split: str) -> datasets.Dataset:
    """Return `train`, `train[:98%]` or `train[10:20]+test` of opened datasets.

    Raises:
        ValueError: there is no such split.
    """
    splits = dict(splits)
    lengths = {name: len(dataset) for name, dataset in splits.items()}
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"there is no split {split!r}, only {', '.join(lengths)} ({error})") from None
    pieces = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return pieces[0] if len(pieces) == 1 else datasets.concatenate_datasets(pieces)


def _from_arrays(images: np.ndarray, labels: np.ndarray, names: list[str]) -> datasets.Dataset:
    """Convert (number, height, width) uint8 images and their class indices to a dataset of PNGs."""
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


class _IdxFolder(Mapping):
    """Splits of a folder in MNIST's format: `train-images-idx3-ubyte.gz`, `train-labels-idx1-ubyte.gz`, ...

    They are decoded when they are read, which takes long.
    """

    def __init__(self, folder: Path):
        self._files = {_split_of_idx(file): file for file in sorted(folder.glob(_IDX_IMAGES))}

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, split: str) -> datasets.Dataset:
        file = self._files[split]
        images = read_idx(file)
        labels = read_idx(file.with_name(file.name.replace("images-idx3", "labels-idx1")))
        names = [str(number) for number in range(int(labels.max()) + 1)]
        return _from_arrays(images, labels, names)


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
