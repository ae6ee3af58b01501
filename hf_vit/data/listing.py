"""A frozen list of images, as large as one likes: an Arrow file with a row for each image, mapped into memory.

The images come from sources: folders and patterns of files, lists of addresses, tars, parquet files, datasets, and
other stores (`s3://`, `gs://`, `hf://`). A source yields its rows one by one when the list is written, and reads an
image by its row afterward, in any process. Neither holds the names of all images in memory.
"""

import json
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from glob import glob, has_magic, iglob
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..files.addresses import redact_secrets
from ..files.download import fetch_image, filesystem_of
from ..files.image_files import IMAGE_SUFFIXES, iterate_images
from ..files.output import new_file
from ..files.reading import parse_json
from ..models.image_decoding import ImageReadingError
from .folders import SHARD_SUFFIXES
from .shards import Columns, check_member, find_image_column, map_table, open_file, read_member, tar_images
from .sources import check_image_paths, expand_braces, load_split, names_of_splits
from .splits import open_split

_SCHEMA = pa.schema({"source": pa.int32(), "name": pa.binary(), "position": pa.int64(), "size": pa.int64()})
_KEY = b"hf_vit"  # key in the metadata of the Arrow file
_ROWS = 65_536  # of a batch of the Arrow file
_OPEN = 16  # files that a process keeps open
_WEB = ("https://", "http://")  # http:// is refused when the image is read


class Row(NamedTuple):
    """An image of a source."""

    name: bytes  # of a file or a member of a tar; empty for a row of a table
    position: int = 0  # byte in a tar, row group of a parquet file, or row of a dataset
    size: int = 0  # bytes in a tar, or row in a row group


class Files:
    """Files on this machine, and addresses; a folder stands for its images, a list has one on each line.

    Args:
        location: what the user named.
        column: column of images, of tars and tables.
        root: folder of relative names; None: the current one.
    """

    def __init__(self, location: str, column: str | None = None, root: str | None = None):
        self.location = location
        self.column = column
        self.root = root or os.getcwd()

    @property
    def description(self) -> str:
        """What the user named, without secrets."""
        return redact_secrets(self.location)

    def is_there(self) -> bool:
        """Return whether a folder, list or shard on this machine still exists; others are not looked for."""
        path = os.path.join(self.root, os.path.expanduser(self.location))
        return "://" in self.location or has_magic(path) or os.path.exists(path)

    def rows(self) -> Iterator[Row]:
        """Yield the images, in an order that is always the same."""
        path = os.path.expanduser(self.location)
        if self.location.startswith(_WEB):
            yield Row(self.location.encode())
        elif os.path.isdir(path):
            yield from (Row(name) for name in iterate_images(path))
        elif path.endswith(".txt"):
            with open(path, "rb") as lines:
                yield from (Row(line.strip()) for line in lines if line.strip())
        elif os.path.exists(path):
            yield Row(os.fsencode(path))
        else:
            yield from (Row(name) for name in _sort(iglob(path, recursive=True)) if not os.path.isdir(name))

    def name(self, row: Row) -> str:
        """Return the name of an image."""
        return os.fsdecode(row.name)

    def path(self, row: Row) -> str | None:
        """Return the absolute path of an image that is a file."""
        name = self.name(row)
        return None if name.startswith(_WEB) else os.path.join(self.root, name)

    def open(self) -> Any:
        """Return what stays open between two images."""
        return None

    def read(self, row: Row, opened: Any) -> Any:
        """Return an image as an input of an image processor."""
        return self.path(row) or fetch_image(self.name(row))


class Store(Files):
    """Images in another store, of a folder or alone, read by fsspec."""

    def rows(self) -> Iterator[Row]:
        filesystem, top = filesystem_of(self.location)
        if filesystem.isfile(top):
            yield Row(top.encode())
            return
        for folder, folders, names in filesystem.walk(top):
            folders.sort()
            for name in sorted(names):
                if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith("."):
                    yield Row(f"{folder}/{name}".encode())

    def name(self, row: Row) -> str:
        return f"{self.location.split('://')[0]}://{row.name.decode().lstrip('/')}"

    def path(self, row: Row) -> None:
        return None

    def open(self) -> Any:
        return filesystem_of(self.location)[0]

    def read(self, row: Row, opened: Any) -> dict[str, Any]:
        try:
            return {"bytes": opened.cat_file(row.name.decode()), "path": self.name(row)}
        except OSError as error:
            raise ImageReadingError(f"cannot read {self.name(row)}: {str(error) or type(error).__name__}") from error


class Tar(Files):
    """Images in a tar, on this machine or in another store."""

    def rows(self) -> Iterator[Row]:
        for image in tar_images(self.location, Columns(image=self.column)):
            yield Row(os.fsencode(image.name), image.position, image.size)

    def name(self, row: Row) -> str:
        return f"{self.location}/{os.fsdecode(row.name)}"

    def path(self, row: Row) -> None:
        return None

    def read(self, row: Row, opened: Any) -> dict[str, Any]:
        if "://" in self.location:  # each image is a request
            member = read_member(self.location, row.position, row.size)
        else:
            with open(os.path.join(self.root, self.location), "rb", buffering=0) as file:
                member = read_member(file, row.position, row.size)
        return {"bytes": check_member(member, self.location, row.position, row.size), "path": self.name(row)}


class Parquet(Tar):
    """Images of a parquet file, on this machine or in another store, read by row groups."""

    def rows(self) -> Iterator[Row]:
        with self._file() as file:
            reader = pq.ParquetFile(file)
            find_image_column(self.location, reader.schema_arrow, self.column)
            counts = [reader.metadata.row_group(group).num_rows for group in range(reader.num_row_groups)]
        for group, count in enumerate(counts):
            yield from (Row(b"", group, row) for row in range(count))

    def _file(self) -> Any:
        return open_file(self.location if "://" in self.location else os.path.join(self.root, self.location))

    def name(self, row: Row) -> str:
        return f"{self.location}:{row.position}:{row.size}"

    def open(self) -> dict[int, Any]:
        return {}  # the row group that was read last, by its number

    def read(self, row: Row, opened: dict[int, Any]) -> dict[str, Any]:
        if row.position not in opened:
            opened.clear()
            with self._file() as file:
                reader = pq.ParquetFile(file)
                column = find_image_column(self.location, reader.schema_arrow, self.column)
                images = reader.read_row_group(row.position, [column], use_threads=False)[column]
            if pa.types.is_struct(images.type):
                check_image_paths(images, column)
            opened[row.position] = images
        image = opened[row.position][row.size].as_py()
        content = image["bytes"] if isinstance(image, dict) else image
        return {"bytes": content or b"", "path": self.name(row)}


class Rows(Files):
    """Rows of a split of a dataset."""

    def __init__(self, location: str, column: str | None = None, root: str | None = None, split: str | None = None):
        super().__init__(location, column, root)
        self.split = split

    def is_there(self) -> bool:
        return True  # it is opened when it is read

    def open(self) -> Any:
        return open_rows(self.location, self.split, self.column)[0]

    def rows(self) -> Iterator[Row]:
        return (Row(b"", row) for row in range(len(self.open())))

    def name(self, row: Row) -> str:
        return f"{self.location}:{self.split}:{row.position}"

    def path(self, row: Row) -> None:
        return None

    def read(self, row: Row, opened: Any) -> Any:
        (image,) = opened[row.position].values()
        image = image or {"bytes": b"", "path": None}  # a row may have no image
        if image["bytes"] is None and image["path"] is not None:
            return image["path"]
        return {"bytes": image["bytes"] or b"", "path": self.name(row)}


_KINDS: dict[str, type[Files]] = {kind.__name__: kind for kind in (Files, Store, Tar, Parquet, Rows)}


def open_rows(name: str, split: str | None, column: str | None) -> tuple[Any, str]:
    """Open the image column of a split, undecoded; return it with the split's name.

    Raises:
        ValueError: there is no such split or column, or there are several splits.
    """
    if split is None:
        names = names_of_splits(name)
        if len(names) != 1:
            raise ValueError(f"{name} has several splits; choose one with --split: {', '.join(names)}")
        split = names[0]
    samples = load_split(name, split)
    if isinstance(samples, list):
        raise ValueError(f"cannot read remote shards: {name}; download them first, or use a dataset on the Hub")
    opened = open_split(samples, image_column=column, needs_labels=False)
    return opened.samples.select_columns(opened.image_column), split


def find_sources(
    inputs: Iterable[str], dataset: str | None = None, split: str | None = None, column: str | None = None
) -> list[Files]:
    """Return the sources that arguments of a command name, in their order, with the dataset last.

    Args:
        inputs: files, folders, patterns, lists of addresses (.txt), tars and parquet files (with ranges such as
            {000..146}), https:// URLs, and addresses of other stores.
        dataset, split: a split of a dataset.
        column: the image column of tars, parquet files and the dataset.

    Raises:
        FileNotFoundError: files do not exist; the message lists them.
        ValueError: there are no inputs, or there is no such split or column.
    """
    sources: list[Files] = []
    missing: list[str] = []
    for argument in inputs:
        path = os.path.expanduser(argument)
        if argument.lower().split("?")[0].endswith(SHARD_SUFFIXES):
            found = expand_braces(argument) if "://" in argument else expand_braces(path)
            for pattern in found:
                shards = _matches(pattern)
                missing += [] if shards else [argument]
                sources += [(Tar if shard.lower().endswith(".tar") else Parquet)(shard, column) for shard in shards]
        elif "://" in argument and not argument.startswith(_WEB):
            sources.append(Store(argument))
        elif argument.startswith(_WEB) or os.path.exists(path) or next(iglob(path, recursive=True), None):
            shards = _shards_in(path) if os.path.isdir(path) else []
            sources += [(Tar if shard.endswith(".tar") else Parquet)(shard, column) for shard in shards]
            sources += [] if shards else [Files(argument)]
        else:
            missing.append(argument)
    if missing:
        raise FileNotFoundError(f"no such file: {', '.join(missing)}")
    if dataset:
        _, split = open_rows(dataset, split, column)
        sources.append(Rows(dataset, column, split=split))
    if not sources:
        raise ValueError("there are no images; give files, folders or URLs, or a dataset with --dataset")
    return sources


def _matches(pattern: str) -> list[str]:
    """Return the files that a path, or a pattern of another store, means."""
    if "://" not in pattern:
        return [pattern] if os.path.exists(pattern) else sorted(glob(pattern))
    if not has_magic(pattern):
        return [pattern]
    filesystem, path = filesystem_of(pattern)
    return sorted(filesystem.unstrip_protocol(name) for name in filesystem.glob(path))


def _shards_in(folder: str) -> list[str]:
    """Return the tars or parquet files of a folder without images."""
    with os.scandir(folder) as entries:
        shards = sorted(entry.path for entry in entries if entry.name.lower().endswith(SHARD_SUFFIXES))
    if shards:
        with suppress(ValueError):
            next(iterate_images(folder))
            return []
    return shards


def write_listing(path: Path, sources: Sequence[Files]) -> int:
    """Write the images of sources to a file, which appears only when it is complete; return their number.

    Raises:
        ValueError: there are no images, or a shard is damaged.
        OSError: a source cannot be read.
    """

    def batches() -> Iterator[pa.RecordBatch]:
        for number, source in enumerate(sources):
            rows = source.rows()
            while batch := list(islice(rows, _ROWS)):
                columns = [[number] * len(batch), *zip(*batch, strict=True)]
                arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
                yield pa.record_batch(arrays, schema=_SCHEMA)

    if not (count := write_rows(path, sources, batches())):
        path.unlink()
        raise ValueError("there are no images in what was given")
    return count


def write_rows(path: Path, sources: Sequence[Files], batches: Iterable[pa.RecordBatch]) -> int:
    """Write rows of sources to a file of a listing, and return their number."""
    about = [{"kind": type(source).__name__, **vars(source)} for source in sources]
    schema = _SCHEMA.with_metadata({_KEY: json.dumps(about)})
    count = 0
    with ExitStack() as opened:
        draft = opened.enter_context(new_file(path, overwrite=True, flush=True))
        file = opened.enter_context(pa.OSFile(str(draft), "wb"))
        writer = opened.enter_context(pa.ipc.new_file(file, schema))
        for batch in batches:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
            count += len(batch)
    return count


def keys_of(listing: "Listing") -> pa.ChunkedArray:
    """Return for each image a text by which it is known in other listings: its source, name and place."""
    keys = []
    for table, sources in zip(listing.tables, listing.sources, strict=True):
        locations = pa.array([os.fsencode(source.location) for source in sources], pa.binary())
        for batch in table.to_batches():
            columns = [locations.take(batch["source"]), batch["name"]]
            columns += [batch[name].cast(pa.string()).cast(pa.binary()) for name in ("position", "size")]
            keys.append(pc.binary_join_element_wise(*columns, b"\0"))  # pyright: ignore[reportAttributeAccessIssue]
    return pa.chunked_array(keys, pa.binary())


def _sort(names: Iterable[str]) -> Iterator[bytes]:
    """Sort names without holding them as objects of Python."""
    found = iter(names)
    chunks = []
    while chunk := [os.fsencode(name) for name in islice(found, _ROWS)]:
        chunks.append(pa.array(chunk, pa.binary()))
    column = pa.chunked_array(chunks, pa.binary())
    column = column.take(pc.sort_indices(column))  # pyright: ignore[reportAttributeAccessIssue]
    return (name.as_py() for name in column)


class Listing(Sequence[Any]):
    """The images of files of `write_listing`, one after the other, as inputs of an image processor.

    A pickled one holds only the paths of the files.

    Args:
        paths: files of `write_listing`.
    """

    def __init__(self, *paths: str):
        self.paths = paths
        self._opened: OrderedDict[tuple[int, int], Any] = OrderedDict()  # files that are open, the last used one last
        self._process = os.getpid()
        self.tables = [map_table(path) for path in paths]
        self._ends = list(accumulate(map(len, self.tables)))
        self.sources = [_sources_of(table) for table in self.tables]

    def __reduce__(self) -> tuple[Any, ...]:
        return Listing, self.paths

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def needs_spawn(self) -> bool:
        """Return whether threads of this process have connections to a store, which a fork would break."""
        remote = (Store, Tar, Parquet)
        sources = [source for of_file in self.sources for source in of_file]
        return any(isinstance(source, remote) and "://" in source.location for source in sources)

    def _find(self, number: int) -> tuple[int, int, Files, Row]:
        """Return the numbers of file and source of an image, its source, and its row."""
        file = bisect_right(self._ends, number)
        table = self.tables[file]
        row = number - (self._ends[file] - len(table))
        source, *values = (table[column][row].as_py() for column in range(4))
        return file, source, self.sources[file][source], Row(*values)

    def name(self, number: int) -> str:
        """Return the name of an image: its path, its address without secrets, or its place in a file or dataset."""
        _, _, source, row = self._find(number)
        return redact_secrets(source.name(row)).encode(errors="backslashreplace").decode()

    def path(self, number: int) -> str | None:
        """Return the absolute path of an image that is a file of its own on this machine."""
        _, _, source, row = self._find(number)
        return source.path(row)

    def check_there(self, number: int) -> None:
        """Raise FileNotFoundError if the folder, list or shard of an image is no longer there."""
        source = self._find(number)[2]
        if not source.is_there():
            raise FileNotFoundError(f"{source.description} is no longer there: its images cannot be read")

    def __getitem__(self, number: Any) -> Any:
        """Return an image as an input of an image processor.

        Raises:
            ImageReadingError: it cannot be fetched.
            ValueError: the shard of the image is damaged or has changed.
            OSError: the shard of the image cannot be read.
        """
        file, number_of_source, source, row = self._find(number)
        if self._process != os.getpid():  # after a fork: connections and positions are those of the parent
            self._opened.clear()
            self._process = os.getpid()
        key = (file, number_of_source)
        if key not in self._opened:
            self._opened[key] = source.open()
            if len(self._opened) > _OPEN:
                self._opened.popitem(last=False)
        self._opened.move_to_end(key)
        return source.read(row, self._opened[key])


def _sources_of(table: pa.Table) -> list[Files]:
    sources = []
    for about in parse_json(table.schema.metadata[_KEY].decode(), "the listing"):
        kind = _KINDS[about.pop("kind")]
        sources.append(kind(**about))
    return sources
