"""Random access to rows of shards: WebDataset tars or parquet files on any file system of fsspec.

The smallest part that can be read is a unit: an image in a tar, or a row group of a parquet file. The index has the
position of each unit. Images in a local tar are read one by one. Everything else is read in blocks, which are
consecutive units and are held until their rows have been used. `samplers.BlockSampler` reads every block once.
"""

import os
import tarfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..files.download import filesystem_of
from .samplers import Block, BlockSampler, Draw
from .shard_index import HEADER, ShardIndex, open_file
from .sources import check_image_paths

_LANES = (1, 2, 4, 6, 12, 24, 48, 96, 192, 480, 960)  # divisible by 2, 3, 4, 6, 8, ... processes
_ROWS_TOGETHER = 250_000  # rows that are shuffled together, as in big_vision
_BYTES_TOGETHER = 2**32  # limit of the bytes held for this, over all processes
_LARGEST_BLOCK = 64  # images per request from a remote tar
_LEAST_BLOCKS = 16  # row groups per lane; two lanes may both read a row group at their border
_THREADS = 8  # for fetching blocks
_OPEN_FILES = 64


class ShardedDataset:
    """Rows of shards, a sequence of {image column: {"bytes", "path"}, label column: label}."""

    def __init__(self, index: ShardIndex, together: int | None = None):
        self.index, self.features, self.together = index, index.features, together
        self.is_local = all("://" not in file for file in index.files)
        self._length = len(index.units["rows"]) if index.is_tar else int(index.units["rows"].sum())
        self.holds_blocks = not (self.is_local and index.is_tar)
        self._divide(together)
        self._held: dict[tuple[int, tuple[int, int]], dict[int, Future]] = {}  # blocks by lane, window and first row
        self._windows: dict[int, tuple[int, int]] = {}  # that were last read, by lane
        self._descriptors: dict[int, int] = {}
        self._footers: dict[int, Any] = {}
        self._process, self._pool = 0, ThreadPoolExecutor(_THREADS)  # which starts threads when they are needed

    def _divide(self, together: int | None) -> None:
        """Choose lanes, blocks and windows from the index."""
        units, rows, ends = self.index.units, self._length, self.index.ends
        if together is None:
            mean_bytes = max(int(units["size"].sum()) // max(rows, 1), 1)
            together = min(_ROWS_TOGETHER, _BYTES_TOGETHER // mean_bytes) if self.holds_blocks else _ROWS_TOGETHER
        together = max(min(together, rows), 1)
        if self.index.is_tar:
            limit = min(rows, together) // 128
        else:
            mean_rows = max(rows // max(len(units["rows"]), 1), 1)
            limit = min(len(units["rows"]) // _LEAST_BLOCKS, together // (2 * mean_rows))
        self.lanes = max((lanes for lanes in _LANES if lanes <= limit), default=1)
        if self.index.is_tar:
            length = min(max(together // (4 * self.lanes), 1), _LARGEST_BLOCK)
            self._first_rows = np.concatenate([np.arange(*file, length) for file in pairwise([0, *ends.tolist()])])
        else:
            self._first_rows = np.cumsum(units["rows"], dtype=np.int64) - units["rows"]
        self.block_lengths = np.diff(np.append(self._first_rows, rows))
        self.window = max(together // max(int(self.lanes * self.block_lengths.mean()), 1), 1)

    def sampler(self, seed: int) -> BlockSampler:
        """Return the order of rows for training."""
        return BlockSampler(self.block_lengths, seed, self.lanes, self.window)

    @property
    def uses_event_loop(self) -> bool:
        """Return whether the file system of the shards has an event loop, as those of http and s3 have."""
        return not self.is_local and filesystem_of(self.index.files[0])[0].async_impl

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedDataset, (self.index, self.together)  # without open files and threads

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.read(Draw(row, 0))

    def read(self, drawn: Draw) -> dict[str, Any]:
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
            return self._sample(row, content[begin : begin + HEADER + size])
        return self._row_of_table(content, row)

    def prefetch(self, drawn: Iterable[Draw]) -> None:
        """Start fetching the blocks of the next rows."""
        for one in drawn:
            self._request(self._block_of(one))

    def _block_of(self, drawn: Draw) -> Block:
        """Block of a row; without one, the whole block with the row, which is in a window of its own."""
        if drawn.block is not None:
            return drawn.block
        number = int(np.searchsorted(self._first_rows, drawn.row, "right")) - 1
        first = int(self._first_rows[number])
        return Block(-1, (0, number), first, first + int(self.block_lengths[number]))

    def _request(self, block: Block) -> Future:
        """Return a block, read or being read."""
        if self._process != os.getpid():  # after a fork: the threads of the parent do not survive it
            self._process, self._pool = os.getpid(), ThreadPoolExecutor(_THREADS)
            self._held, self._windows = {}, {}
        blocks = self._held.setdefault((block.lane, block.window), {})
        if block.first not in blocks:
            blocks[block.first] = self._pool.submit(self._fetch, block)
        return blocks[block.first]

    def _fetch(self, block: Block) -> Any:
        file = self._file_of(block.first)
        if self.index.is_tar:
            (begin, _), (last, size) = self._extent(block.first), self._extent(block.end - 1)
            return read_range(self.index.files[file], begin - HEADER, last + size)
        return self._read_group(file, int(self.index.units["position"][self._unit_of(block.first)]))

    def _unit_of(self, row: int) -> int:
        return row if self.index.is_tar else int(np.searchsorted(self._first_rows, row, "right")) - 1

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
        return os.pread(self._descriptors[file], HEADER + size, position - HEADER)

    def _sample(self, row: int, member: bytes) -> dict[str, Any]:
        """Return a row of a tar from its member's bytes, with the header, whose size is checked."""
        position, size = self._extent(row)
        try:
            stated = tarfile.TarInfo.frombuf(member[:HEADER], "utf-8", "surrogateescape").size
        except tarfile.HeaderError:
            stated = None
        if stated != size or len(member) != HEADER + size:
            raise ValueError(
                f"{self.index.files[self._file_of(row)]} is damaged, or has changed since it was indexed: "
                f"it has no image of {size} bytes at byte {position}"
            )
        sample: dict[str, Any] = {self.index.image_column: {"bytes": member[HEADER:], "path": None}}
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
        sample = table.slice(row - int(self._first_rows[self._unit_of(row)]), 1).to_pylist()[0]
        content = sample[self.index.image_column]
        if isinstance(content, bytes):
            sample[self.index.image_column] = {"bytes": content, "path": None}
        if (column := self.index.label_column) is not None and isinstance(sample[column], str):
            sample[column] = self.index.features[column].str2int(sample[column])
        return sample


def read_range(name: str, begin: int, end: int) -> bytes:
    """Read bytes `begin` to `end` of a remote file, in one request."""
    filesystem, path = filesystem_of(name)
    if filesystem.async_impl:
        return filesystem.cat_file(path, start=begin, end=end)
    with filesystem.open(path, "rb", cache_type="none") as file:
        file.seek(begin)
        return file.read(end - begin)
