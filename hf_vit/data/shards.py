"""Shards: WebDataset tars or parquet files on any file system of fsspec, their index, and random access to their rows.

The smallest part that can be read is a unit: an image in a tar, or a row group of a parquet file. The index has the
position of each unit. It is made once and stored next to the shards, or in the cache if they are remote or in a
read-only folder. It is an Arrow file with a row for each unit. Its metadata are a JSON text with the names of the
shards, stamps to detect changes, and their columns and classes.

Images in a local tar are read one by one. Everything else is read in blocks, which are consecutive units and are held
until their rows have been used. `samplers.BlockSampler` reads every block once.
"""

import hashlib
import io
import json
import logging
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from posixpath import basename, dirname
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock
from tqdm import tqdm

from ..files.cache import index_folder
from ..files.download import filesystem_of
from ..files.messages import join_names
from ..files.output import new_file, write_text
from ..files.reading import parse_json
from ..models.sizes import MAX_LABELS
from .columns import find_column, find_label_column, is_image, is_image_struct
from .folders import EXTENSIONS
from .samplers import Block, BlockSampler, Sample
from .sources import check_image_paths

_logger = logging.getLogger(__name__)
_HEADER = 512  # bytes before the content of a tar's member
_VERSION = 1
_THREADS = 8  # for reading shards and fetching blocks
_SCHEMA = pa.schema({"position": pa.int64(), "size": pa.int64(), "rows": pa.int32(), "label": pa.int32()})
_STAMPS = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified")  # keys of fsspec's file systems
_IMAGES = frozenset(extension[1:] for extension in EXTENSIONS)
_LANES = (1, 2, 4, 6, 12, 24, 48, 96, 192, 480, 960)  # divisible by 2, 3, 4, 6, 8, ... processes
_SHUFFLE_BUFFER = 250_000  # rows that are shuffled together, as in big_vision
_SHUFFLE_BYTES = 2**32  # limit of the bytes held for this, over all processes
_LARGEST_BLOCK = 64  # images per request from a remote tar
_BLOCKS_OF_LANE = 4  # at least, in the window of a lane of a tar
_ROWS_OF_LANE = 128  # at least, in a tar
_GROUPS_OF_LANE = 16  # row groups, at least; two lanes may both read the row group at their border
_OPEN_FILES = 64


@dataclass
class ShardIndex:
    """Positions of the rows of shards; the arrays are mapped from a file and shared by all processes."""

    path: str  # of the index file
    files: list[str]  # paths or addresses
    stamps: list[list]  # size, and modification time or etag, of each file
    ends: np.ndarray  # (files,) number of the unit after the last one of each file
    features: datasets.Features
    image_column: str
    label_column: str | None
    num_labels: int | None
    are_counted: bool = False  # the classes are the values of the column, not stated

    @cached_property
    def units(self) -> dict[str, np.ndarray]:
        """Arrays over units: position (in bytes, or the number of a row group), size (in bytes), rows and label."""
        table = map_table(self.path)
        return {name: table[name].chunk(0).to_numpy() for name in table.column_names}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "units"}

    @property
    def is_tar(self) -> bool:
        """Return whether the shards are tars, whose units are images."""
        return self.files[0].endswith(".tar")

    @property
    def is_local(self) -> bool:
        """Return whether all files are on this machine's disks."""
        return all("://" not in file for file in self.files)

    @property
    def num_rows(self) -> int:
        """Number of images, or of rows of tables."""
        return len(self.units["rows"]) if self.is_tar else int(self.units["rows"].sum())


def map_table(path: str) -> pa.Table:
    """Map the table of an Arrow file without reading it into memory."""
    return pa.ipc.open_file(pa.memory_map(path)).read_all()


class Columns(NamedTuple):
    """Columns to read from the shards."""

    image: str | None = None  # by default the only image column
    label: str | None = None  # by default "cls" in tars, the column of class labels in parquet files
    needs_labels: bool = True
    counts_labels: bool = True  # count classes without names; False if their number is known


def open_index(files: Sequence[str], columns: Columns) -> ShardIndex:
    """Return the index of some shards; a missing or outdated one is made first, by one process per machine.

    It is stored next to the shards, or in the cache.

    Raises:
        ValueError: a shard is damaged, or has no images or labels.
        OSError: a shard cannot be read.
    """
    with ThreadPoolExecutor(_THREADS) as pool:
        stamps = list(pool.map(_stamp, files))
    name = _index_name(files, columns)
    cached, neighbor = str(_cache() / name), f"{dirname(files[0]) or '.'}/{name}"
    with FileLock(f"{cached}.lock"):
        index = _load(neighbor, cached, files, stamps) or _load(cached, cached, files, stamps)
        if index is None:
            path = neighbor if os.access(dirname(neighbor), os.W_OK) else cached
            _write_index(Path(path), _build(files, stamps, columns))
            index = _load(path, cached, files, stamps)
    assert index is not None
    if not columns.needs_labels and columns.label is None:
        return replace(index, label_column=None, num_labels=None)
    if index.is_tar and (missing := int((index.units["label"] < 0).sum())):
        raise ValueError(
            f"{missing} images of {join_names(list(files))} have no {index.label_column}; set --label-column"
        )
    return index


def index_shards(files: Sequence[str], names: list[str] | None) -> int:
    """Write the index of tars next to them, and return the number of images; all can be moved together.

    Args:
        names: class names by number, if any.
    """
    path = Path(files[0]).with_name(_index_name(files, Columns()))
    stamps = [_stamp(file) for file in files]
    table = _build(files, stamps, Columns())
    about = parse_json(table.schema.metadata[b"hf_vit"].decode(), str(path))
    about["stamps"] = [[size, None] for size, _ in stamps]
    if names is not None:
        label = datasets.Features({about["label_column"]: datasets.ClassLabel(names=names)}).to_dict()
        about = about | {
            "features": about["features"] | label,
            "num_labels": len(names),
            "are_counted": False,
        }
    _write_index(path, table.replace_schema_metadata({"hf_vit": json.dumps(about)}))
    return table.num_rows


def stored_class_names(files: Sequence[str], columns: Columns) -> list[str] | None:
    """Return the class names in the index next to local tars, if `hf-vit shard` wrote them; `datasets` ignores it."""
    path = f"{dirname(files[0]) or '.'}/{_index_name(files, columns)}"
    index = _load(path, path, files, [_stamp(file) for file in files])
    return None if index is None else getattr(index.features[str(index.label_column)], "names", None)


def _write_index(path: Path, table: pa.Table) -> None:
    """Write an index atomically."""
    with new_file(path, overwrite=True) as file, pa.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table.combine_chunks())


def _index_name(files: Sequence[str], columns: Columns) -> str:
    """File name of the index of some shards; that of tars always has the labels."""
    about: list[Any] = list(columns)
    if files[0].endswith(".tar"):
        about = list(Columns(columns.image, columns.label or "cls"))
    elif columns.label is None:
        about.append("names before types")  # the column is found by another rule than in earlier indexes
    return f"hf_vit_index-{_digest([list(map(basename, files)), about])}.arrow"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _cache() -> Path:
    return index_folder("shards", "indexes")


def _stamp(file: str) -> list:
    """Size of a file, and its modification time or etag if known."""
    if "://" not in file:
        status = os.stat(file)
        return [status.st_size, str(status.st_mtime_ns)]
    filesystem, path = filesystem_of(file)
    about = filesystem.info(path)
    stamp = next((about[name] for name in _STAMPS if about.get(name)), None)
    return [about["size"], None if stamp is None else str(stamp)]


def _load(path: str, cached: str, files: Sequence[str], stamps: list) -> ShardIndex | None:
    """Read an index if it exists and is valid; a remote one is copied to the cache."""
    try:
        if "://" in path:
            with open_file(path) as source, new_file(cached, overwrite=True) as copy:
                copy.write_bytes(source.read())
            path = cached
        about = parse_json(map_table(path).schema.metadata[b"hf_vit"].decode(), path)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if about["version"] != _VERSION or about["files"] != list(map(basename, files)):
        return None
    pairs = zip(about["stamps"], stamps, strict=True)
    if not all(kept[0] == now[0] and kept[1] in (None, now[1]) for kept, now in pairs):
        return None
    features = datasets.Features.from_dict(about["features"])
    image, label, num_labels = (about[name] for name in ("image_column", "label_column", "num_labels"))
    ends = np.array(about["ends"], np.int64)
    are_counted = about.get("are_counted", False)
    return ShardIndex(path, list(files), stamps, ends, features, image, label, num_labels, are_counted)


def _build(files: Sequence[str], stamps: list, columns: Columns) -> pa.Table:
    """Make the index by reading every shard, with a common numbering of class names; a killed process is continued."""
    folder = (_cache() / _index_name(files, columns)).with_suffix(".parts")
    folder.mkdir(exist_ok=True)

    def scan(file: str, stamp: list) -> dict[str, Any]:
        part = folder / f"{_digest([file, stamp])}.json"
        if not part.exists():
            scanned = scan_tar(file, columns) if file.endswith(".tar") else _scan_parquet(file, columns)
            write_text(part, json.dumps(scanned))
        scanned = parse_json(part.read_text(encoding="utf-8"), str(part))
        return scanned | {name: np.array(scanned[name], np.int64) for name in _SCHEMA.names}

    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(tqdm(pool.map(scan, files, stamps), "Indexing", len(files), unit=" shards", delay=1))
    first = _first_with_images(files, parts)
    names = _number_names_alike(parts)
    positions = {name: np.concatenate([part[name] for part in parts]) for name in _SCHEMA.names}
    features: dict[str, Any] = {first["image_column"]: datasets.Image(decode=False)}
    label = first["label_column"]
    if first["feature"] is not None:
        features |= datasets.Features.from_dict({label: first["feature"]})
    elif label is not None:
        features[label] = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    about = {
        "version": _VERSION,
        "files": list(map(basename, files)),
        "stamps": stamps,
        "ends": np.cumsum([len(part["rows"]) for part in parts]).tolist(),
        "features": datasets.Features(features).to_dict(),
        "image_column": first["image_column"],
        "label_column": label,
        "num_labels": len(names) or max(part["num_labels"] for part in parts) or None,
        "are_counted": first["feature"] is None,
    }
    shutil.rmtree(folder)
    return pa.table(positions).cast(_SCHEMA).replace_schema_metadata({"hf_vit": json.dumps(about)})


def _first_with_images(files: Sequence[str], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the first shard with images holds.

    Raises:
        ValueError: no shard has images, or another one has another type of labels.
    """
    filled = [(file, part) for file, part in zip(files, parts, strict=True) if len(part["rows"])]
    if not filled:
        raise ValueError(f"there are no images in {join_names(list(files))}")
    _, first = filled[0]
    for file, part in filled:
        if part["kind"] != first["kind"]:
            raise ValueError(f"{file} has labels of type {part['kind']} (expected {first['kind']}, as in other shards)")
    return first


def _number_names_alike(parts: list[dict[str, Any]]) -> list[str]:
    """Return the sorted class names of all shards; the labels of each shard become indices of this list."""
    names = sorted({name for part in parts for name in part["names"]})
    if names:
        for part in parts:
            common = np.searchsorted(names, part["names"])
            part["label"] = np.append(common, -1)[part["label"]]  # -1, no label, is the last one
    return names


def scan_tar(file: str, columns: Columns) -> dict[str, Any]:
    """Positions of the images in a tar, and their labels; -1 for no label.

    Raises:
        ValueError: the file is truncated, or not a tar.
    """
    positions, sizes, texts, column = [], [], [], columns.image
    for image in tar_images(file, columns):
        column = column or image.extension
        positions.append(image.position)
        sizes.append(image.size)
        texts.append(image.text)
    given = sorted({*texts} - {None})
    if are_numbers := all(map(str.isdecimal, given)):
        numbers = {text: int(text) for text in given}
    else:
        numbers = {text: number for number, text in enumerate(given)}
    if max(numbers.values(), default=0) >= MAX_LABELS:
        raise ValueError(f"{file} has the class index {max(numbers.values())} (expected less than {MAX_LABELS})")
    labels = [numbers.get(text, -1) for text in texts]
    return {
        "position": positions,
        "size": sizes,
        "rows": [1] * len(sizes),
        "label": labels,
        "names": [] if are_numbers else given,
        "num_labels": max(labels, default=-1) + 1,
        "kind": "class indices" if are_numbers else "text",
        "feature": None,
        "image_column": column or "image",
        "label_column": columns.label or "cls",
    }


class TarImage(NamedTuple):
    """An image in a tar."""

    name: str  # of the member
    extension: str  # what follows the first dot of the name
    position: int  # in bytes
    size: int
    text: str | None  # of the label of its sample


def tar_images(file: str, columns: Columns) -> Iterator[TarImage]:
    """Yield the images of a tar.

    Raises:
        ValueError: the file is truncated, or not a tar; or a sample has several images.
    """
    label = columns.label or "cls"
    for sample in read_tar_samples(file, label):
        found = [name for name in sample if name.rsplit(".", 1)[-1].lower() in _IMAGES]
        found = [name for name in found if columns.image in (None, name)]
        if len(found) > 1:
            raise ValueError(f"{file} has {' and '.join(found)} in one sample; choose one with --image-column")
        if found:
            position, size, _, name = sample[found[0]]
            text = sample[label][2] if label in sample else None
            yield TarImage(name, found[0], position, size, text)


def read_tar_samples(file: str, label: str) -> Iterator[dict[str, tuple]]:
    """Yield {extension: (position, size, text, name)} for members with the same name before the first dot.

    The text is that of the label, and None for other members.
    """
    key, sample, end = None, {}, 0
    links = 0
    with open_file(file, block_size=2**23) as source:
        try:
            with tarfile.open(fileobj=source, mode="r:") as archive:
                for member in archive:
                    archive.members = []  # pyright: ignore[reportAttributeAccessIssue] - otherwise it keeps all members
                    end = member.offset_data + -(-member.size // _HEADER) * _HEADER
                    folder, _, name = member.name.rpartition("/")
                    stem, dot, extension = name.partition(".")
                    links += member.islnk() or member.issym()
                    if not member.isfile() or not stem or not dot:
                        continue
                    if (folder, stem) != key and sample:
                        yield sample
                        sample = {}
                    key, text = (folder, stem), None
                    if extension == label and (content := archive.extractfile(member)):
                        text = content.read(4096).decode("utf-8", "replace").strip()
                    sample[extension] = (member.offset_data, member.size, text, member.name)
            length = source.seek(0, io.SEEK_END)
            source.seek(end)
            if length < end or any(source.read(_HEADER)):
                raise tarfile.ReadError(f"not a tar after byte {end}")
        except (tarfile.TarError, EOFError) as error:
            raise ValueError(f"{file} is damaged, or not an uncompressed tar: {error}") from error
    if sample:
        yield sample
    if links:
        _logger.warning(f"not used, links in {file}: {links:,} (write the tar with their content)")


def _scan_parquet(file: str, columns: Columns) -> dict[str, Any]:
    """Row groups of a parquet file, and the number of classes of its labels.

    Raises:
        ValueError: the file is damaged, or lacks the columns.
    """
    try:
        with open_file(file) as source:
            reader = pq.ParquetFile(source)
            features = datasets.Features.from_arrow_schema(reader.schema_arrow)
            image = find_image_column(file, reader.schema_arrow, columns.image)
            label = None
            if columns.needs_labels or columns.label is not None:
                label = find_label_column(features, columns.label)
            feature = None if label is None else features[label]
            groups = [reader.metadata.row_group(number) for number in range(reader.num_row_groups)]
            is_plain = isinstance(feature, datasets.Value)
            is_text = is_plain and "string" in feature.dtype
            values: set[Any] = set()
            if is_text or (is_plain and columns.counts_labels):
                values = set(reader.read([label])[label].to_pylist()) - {None}
    except (pa.ArrowInvalid, pa.ArrowKeyError, EOFError) as error:
        raise ValueError(f"{file} is damaged, or not a parquet file: {error}") from error
    stored_feature = None
    if label is not None and not is_plain:
        stored_feature = dict(datasets.Features({label: feature}).to_dict())[label]
    return {
        "position": list(range(len(groups))),
        "size": [group.total_byte_size for group in groups],
        "rows": [group.num_rows for group in groups],
        "label": [-1] * len(groups),
        "names": sorted(values) if is_text else [],
        "num_labels": 0 if is_text else max(values, default=-1) + 1,
        "kind": str(feature),
        "feature": stored_feature,
        "image_column": image,
        "label_column": label,
    }


def find_image_column(file: str, schema: pa.Schema, name: str | None) -> str:
    """Return the column of images of a parquet file; None: the only one.

    Raises:
        ValueError: there is none, or there are several.
    """
    features = datasets.Features.from_arrow_schema(schema)
    for column, feature in features.items():
        if is_image_struct(feature) or feature == datasets.Value("binary"):
            features[column] = datasets.Image()
    found = find_column(features, name, is_image, "image")
    if not is_image(features[found]):
        raise ValueError(f"the column {found} of {file} has no images; choose another --image-column")
    return found


def open_file(name: str, block_size: int | None = None) -> Any:
    """Open a local or remote binary file; a remote one reads ahead in blocks of `block_size` bytes, if it is given."""
    if "://" not in name:
        return open(name, "rb")
    filesystem, path = filesystem_of(name)
    options: dict[str, Any] = {"block_size": block_size} if block_size else {"cache_type": "none"}
    return filesystem.open(path, "rb", **options)


class BlockPlan(NamedTuple):
    """How the rows of shards are divided for reading in shuffled order, see `BlockSampler`."""

    first_rows: np.ndarray  # (blocks,) first row of each block
    lengths: np.ndarray  # (blocks,) number of rows of each block
    lanes: int
    window: int  # blocks of a lane whose rows are shuffled together


def plan_blocks(index: ShardIndex, shuffle_buffer: int | None = None) -> BlockPlan:
    """Divide the rows of shards into blocks, and choose the number of lanes and the window.

    The block of a remote tar is a request of up to 64 images; that of tables is a row group.

    Args:
        shuffle_buffer: number of rows that are shuffled together; None: 250,000, or fewer if they are held in memory
            and have more than 4 GiB.
    """
    num_rows = index.num_rows
    sizes = index.units["size"]
    buffer = shuffle_buffer or _SHUFFLE_BUFFER
    if shuffle_buffer is None and not (index.is_tar and index.is_local):
        mean_bytes = max(int(sizes.sum()) // max(num_rows, 1), 1)
        buffer = min(buffer, _SHUFFLE_BYTES // mean_bytes)
    buffer = max(min(buffer, num_rows), 1)
    if index.is_tar:
        most_lanes = buffer // _ROWS_OF_LANE
    else:
        mean_rows = max(num_rows // max(len(sizes), 1), 1)
        most_lanes = min(len(sizes) // _GROUPS_OF_LANE, buffer // (2 * mean_rows))  # two row groups in a window
    lanes = max((lanes for lanes in _LANES if lanes <= most_lanes), default=1)
    if index.is_tar:
        length = min(max(buffer // (_BLOCKS_OF_LANE * lanes), 1), _LARGEST_BLOCK)
        first_rows = divide_tars(index, length)
    else:
        first_rows = np.cumsum(index.units["rows"], dtype=np.int64) - index.units["rows"]
    lengths = np.diff(np.append(first_rows, num_rows))
    window = buffer // max(int(lanes * lengths.mean()), 1)
    return BlockPlan(first_rows, lengths, lanes, max(window, 1))


def divide_tars(index: ShardIndex, length: int) -> np.ndarray:
    """Return the first row of each block of `length` images; a block does not go beyond its file."""
    files = pairwise([0, *index.ends.tolist()])
    return np.concatenate([np.arange(begin, end, length) for begin, end in files])


class ShardedDataset:
    """Rows of shards, a sequence of {image column: {"bytes", "path"}, label column: label}."""

    def __init__(self, index: ShardIndex, plan: BlockPlan):
        self.index = index
        self.plan = plan
        self.features = index.features
        self.holds_blocks = not (index.is_local and index.is_tar)
        self._length = index.num_rows
        self._held: dict[tuple[int, tuple[int, int]], dict[int, Future]] = {}  # blocks by lane, window and first row
        self._windows: dict[int, tuple[int, int]] = {}  # that were last read, by lane
        self._descriptors: dict[int, int] = {}
        self._footers: dict[int, Any] = {}
        self._process = 0
        self._pool = ThreadPoolExecutor(_THREADS)  # which starts threads when they are needed

    def sampler(self, seed: int) -> BlockSampler:
        """Return the order of rows for training."""
        return BlockSampler(self.plan.lengths, seed, self.plan.lanes, self.plan.window)

    @property
    def uses_event_loop(self) -> bool:
        """Return whether the file system of the shards has an event loop, as those of http and s3 have."""
        return not self.index.is_local and filesystem_of(self.index.files[0])[0].async_impl

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedDataset, (self.index, self.plan)  # without open files and threads

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.read(Sample(row, 0))

    def read(self, drawn: Sample) -> dict[str, Any]:
        """Read one row; a block is held until the row of another window of its lane is read.

        Raises:
            ValueError: the shard is damaged or has changed.
            OSError: it cannot be read.
        """
        row = drawn.row
        if not self.holds_blocks:
            return self._sample(row, self._read_local(row))
        block = self._block_of(drawn)
        content = self._request(block).result()
        before = self._windows.setdefault(block.lane, block.window)
        if before != block.window:
            del self._held[block.lane, before]
            self._windows[block.lane] = block.window
        if self.index.is_tar:
            position, size = self._extent(row)
            begin = position - self._extent(block.first)[0]
            return self._sample(row, content[begin : begin + _HEADER + size])
        return self._row_of_table(content, row)

    def prefetch(self, drawn: Iterable[Sample]) -> None:
        """Start fetching the blocks of the next rows."""
        for one in drawn:
            self._request(self._block_of(one))

    def _block_of(self, drawn: Sample) -> Block:
        """Block of a row; without one, the whole block with the row, which is in a window of its own."""
        if drawn.block is not None:
            return drawn.block
        number = self._block_number(drawn.row)
        first = int(self.plan.first_rows[number])
        return Block(-1, (0, number), first, first + int(self.plan.lengths[number]))

    def _block_number(self, row: int) -> int:
        return int(np.searchsorted(self.plan.first_rows, row, "right")) - 1

    def _request(self, block: Block) -> Future:
        """Return a block, read or being read."""
        if self._process != os.getpid():  # after a fork: the threads of the parent do not survive it
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(_THREADS)
            self._held = {}
            self._windows = {}
        blocks = self._held.setdefault((block.lane, block.window), {})
        if block.first not in blocks:
            blocks[block.first] = self._pool.submit(self._fetch, block)
        return blocks[block.first]

    def _fetch(self, block: Block) -> Any:
        file = self._file_of(block.first)
        if self.index.is_tar:
            begin, _ = self._extent(block.first)
            last, size = self._extent(block.end - 1)
            return read_range(self.index.files[file], begin - _HEADER, last + size)
        return self._read_group(file, int(self.index.units["position"][self._unit_of(block.first)]))

    def _unit_of(self, row: int) -> int:
        return row if self.index.is_tar else self._block_number(row)

    def _file_of(self, row: int) -> int:
        return int(np.searchsorted(self.index.ends, self._unit_of(row), "right"))

    def _extent(self, row: int) -> tuple[int, int]:
        """(position, size) in bytes of the image of a row of a tar."""
        return int(self.index.units["position"][row]), int(self.index.units["size"][row])

    def _read_local(self, row: int) -> bytes:
        """Read a member of a local tar with its header."""
        file, (position, size) = self._file_of(row), self._extent(row)
        if file not in self._descriptors:
            if len(self._descriptors) >= _OPEN_FILES:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[file] = os.open(self.index.files[file], os.O_RDONLY)
        return os.pread(self._descriptors[file], _HEADER + size, position - _HEADER)

    def _sample(self, row: int, member: bytes) -> dict[str, Any]:
        """Return a row of a tar from its member's bytes, with the header, whose size is checked."""
        content = check_member(member, self.index.files[self._file_of(row)], *self._extent(row))
        sample: dict[str, Any] = {self.index.image_column: {"bytes": content, "path": None}}
        if self.index.label_column is not None:
            sample[self.index.label_column] = int(self.index.units["label"][row])
        return sample

    def _read_group(self, file: int, group: int) -> pa.Table:
        name = self.index.files[file]
        columns = [column for column in (self.index.image_column, self.index.label_column) if column is not None]
        try:
            with open_file(name) as source:
                reader = pq.ParquetFile(source, metadata=self._footers.get(file), pre_buffer=True)
                self._footers[file] = reader.metadata
                table = reader.read_row_group(group, columns=columns, use_threads=False)
        except (pa.ArrowInvalid, pa.ArrowKeyError, OSError, EOFError) as error:
            raise ValueError(f"{name} is damaged, or has changed since it was indexed: {error}") from error
        if pa.types.is_struct(table.schema.field(self.index.image_column).type):
            check_image_paths(table[self.index.image_column], self.index.image_column)
        return table

    def _row_of_table(self, table: pa.Table, row: int) -> dict[str, Any]:
        sample = table.slice(row - int(self.plan.first_rows[self._unit_of(row)]), 1).to_pylist()[0]
        content = sample[self.index.image_column]
        if isinstance(content, bytes):
            sample[self.index.image_column] = {"bytes": content, "path": None}
        if (column := self.index.label_column) is not None and isinstance(sample[column], str):
            sample[column] = self.index.features[column].str2int(sample[column])
        return sample


def read_member(source: Any, position: int, size: int) -> bytes:
    """Read a member of a tar with its header, from an open file or from an address."""
    if isinstance(source, str):
        return read_range(source, position - _HEADER, position + size)
    source.seek(position - _HEADER)
    return source.read(_HEADER + size)


def check_member(member: bytes, file: str, position: int, size: int) -> bytes:
    """Return the content of a member of a tar that was read with its header.

    Raises:
        ValueError: it is not the member that the index says.
    """
    try:
        stated = tarfile.TarInfo.frombuf(member[:_HEADER], "utf-8", "surrogateescape").size
    except tarfile.HeaderError:
        stated = None
    if stated != size or len(member) != _HEADER + size:
        state = f"it has no image of {size} bytes at byte {position}"
        raise ValueError(f"{file} is damaged, or has changed since it was indexed: {state}")
    return member[_HEADER:]


def read_range(name: str, begin: int, end: int) -> bytes:
    """Read bytes `begin` to `end` of a remote file, in one request."""
    filesystem, path = filesystem_of(name)
    if filesystem.async_impl:
        return filesystem.cat_file(path, start=begin, end=end)
    with filesystem.open(path, "rb", cache_type="none") as file:
        file.seek(begin)
        return file.read(end - begin)
