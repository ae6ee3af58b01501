"""Folders as datasets: images in folders of classes, images with tables of labels, and Parquet or tar files.

`layout` decides what is which split. Of a folder, an index is stored in the Hugging Face assets cache: `index.json`
(the last change of each directory, to see whether the index is still valid) and, for every split of images without a
table, an Arrow file that later runs and workers map into memory.
"""

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from filelock import FileLock
from tqdm import tqdm

from ..files.cache import index_folder
from ..files.image_files import IMAGE_SUFFIXES, is_companion
from ..files.messages import join_names
from ..files.output import MARK, new_folder
from ..files.reading import parse_json
from .layout import Arrangement, Folder, arrange, arrange_files
from .tables import TABLES, has_labels, load_tables

_THREADS = 16  # for listing directories, which mostly waits for the disk or the network
_DEEPEST = 8  # folders in folders that are listed
EXTENSIONS = frozenset(IMAGE_SUFFIXES)
SHARD_SUFFIXES = (".parquet", ".tar")
_ARCHIVES = (".zip", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")

# Reasons for which something is not used
_EMPTY = "not used, folders without images"
_OUTPUTS = "not used, folders that hf-vit wrote"
_UNKNOWN = "not used, files that are no images"
_PACKED = "not used, archives (unpack them)"
_DEEP = "not used, folders that are too deep"
_BESIDE_SHARDS = "not used, images beside Parquet or tar files"
_OTHER_SHARDS = "not used, tar files beside Parquet files"
_TABLES = "not used, tables without a column of labels"


@dataclass
class FolderIndex:
    """What a folder holds.

    Args:
        kind: "images", "tables", or the suffix of shards.
        digest: of the names of the images.
        splits: for each split the user's folders, or the paths of the shards.
        unused: names of what is not used, by reason.
        changed: last change of each directory, in nanoseconds.
        tables: paths of the tables with labels.
        images: paths of the images, if there are tables.
    """

    kind: str
    digest: str
    splits: dict[str, list[str]]
    unused: dict[str, list[str]]
    changed: dict[str, int]
    tables: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)


class FolderData(NamedTuple):
    """Splits of a folder: opened, or the paths of shards; the user's folders or files of each; and what is not used."""

    splits: dict[str, Any]
    sources: dict[str, list[str]]
    unused: dict[str, list[str]]
    suffix: str | None = None  # of shards


class _Listing(NamedTuple):
    """One directory, whose path is relative to the folder and ends with a slash."""

    directory: str
    changed: int  # nanoseconds
    state: tuple[int, int]  # device and inode
    directories: list[str]
    images: list[str]
    others: list[str]  # names of other files
    is_output: bool  # of hf_vit


def load_folder(folder: Path, title: str, layout: str | None = None, label_column: str | None = None) -> FolderData:
    """Open the splits of a folder from its index; a missing or outdated one is made first.

    Args:
        title: the folder as the user named it, for messages.
        layout: as in `arrange`.
        label_column: the column of a table that the user names.

    Returns:
        For each split of images the columns image (an undecoded path) and, if there are classes, label, with rows
        sorted by path.

    Raises:
        ValueError: the folder has no images, or can be read in two ways.
    """
    folder = Path(os.path.abspath(folder))
    _refuse_undecodable(str(folder))
    key = json.dumps([str(folder), sorted(EXTENSIONS), layout, label_column])
    cache = index_folder("folders", hashlib.sha256(key.encode()).hexdigest()[:16])
    file = cache / "index" / "index.json"
    with FileLock(cache / "lock"):
        index = _read_index(file, folder)
        if index is None:
            shutil.rmtree(file.parent, ignore_errors=True)
            with new_folder(file.parent) as draft:
                index = _write_index(draft, folder, title, layout, label_column)
                (draft / file.name).write_text(json.dumps(asdict(index)), encoding="utf-8")
    if index.kind == "tables":
        splits, sources, unused = load_tables(folder, index.tables, index.images, title, layout)
        return FolderData(splits, sources, index.unused | unused)
    if index.kind != "images":
        shards = {split: [f"{folder.as_posix()}/{name}" for name in names] for split, names in index.splits.items()}
        return FolderData(shards, index.splits, index.unused, index.kind)
    opened = {split: datasets.Dataset.from_file(str(file.parent / f"{split}.arrow")) for split in index.splits}
    for split, samples in opened.items():  # from the images' names, not from the index file
        samples._fingerprint = f"{index.digest}-{split}"
    return FolderData(opened, index.splits, index.unused)


def _read_index(file: Path, folder: Path) -> FolderIndex | None:
    """Read an index; None if a directory has changed since it was made."""
    try:
        index = FolderIndex(**parse_json(file.read_text(encoding="utf-8"), str(file)))
        with ThreadPoolExecutor(_THREADS) as pool:
            changes = pool.map(lambda name: (folder / name).stat().st_mtime_ns, index.changed)
            return index if list(changes) == list(index.changed.values()) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _write_index(draft: Path, folder: Path, title: str, layout: str | None, label_column: str | None) -> FolderIndex:
    """List a folder, decide what it holds, and write the Arrow files of its images."""
    unused: dict[str, list[str]] = {}
    listings = _list_all(folder, unused)
    changed = {listing.directory: listing.changed for listing in listings}
    root = _tree_of(listings)
    images = root.files() if root else []
    tables, shards = _find_tables_and_shards(listings, bool(images), unused)
    if shards:
        suffix, splits = _arrange_shards(shards, root, title, layout, unused)
        unused |= {_BESIDE_SHARDS: images, _TABLES: tables}
        return FolderIndex(suffix, "", splits, _without_empty(unused), changed)
    if root is None:
        raise no_images(title, unused)
    index_of_tables = FolderIndex("tables", "", {}, _without_empty(unused), changed, tables, images)
    if tables and has_labels(folder, tables, label_column):
        return index_of_tables
    arrangement = arrange(root, title, layout)
    if tables and not arrangement.has_classes:
        return index_of_tables
    unused |= {_TABLES: tables, _EMPTY: _empty_folders(listings, root), **arrangement.unused}
    digest = _write_images(draft, folder, arrangement)
    return FolderIndex("images", digest, arrangement.sources, _without_empty(unused), changed)


def _find_tables_and_shards(
    listings: list[_Listing], has_images: bool, unused: dict[str, list[str]]
) -> tuple[list[str], list[str]]:
    """Return the paths of tables and of shards; files that are expected beside neither are noted as not used."""
    tables = []
    shards = []
    for listing in listings:
        for name in listing.others:
            path = listing.directory + name
            suffix = PurePath(name).suffix.lower()
            if name in TABLES and (has_images or suffix != ".parquet"):
                tables.append(path)
            elif suffix in SHARD_SUFFIXES:
                shards.append(path)
            elif not is_companion(name):
                reason = _PACKED if suffix in _ARCHIVES else _UNKNOWN
                unused.setdefault(reason, []).append(path)
    return tables, shards


def _arrange_shards(
    shards: list[str], root: Folder | None, title: str, layout: str | None, unused: dict[str, list[str]]
) -> tuple[str, dict[str, list[str]]]:
    """Return the suffix of a folder's shards and those of each split: Parquet files if there are any, otherwise tars.

    Raises:
        ValueError: there are folders of images beside them.
    """
    if root is not None and len(root.below()) > 1:
        pattern = PurePath(title, shards[0]).with_name(f"*{PurePath(shards[0]).suffix}")
        raise ValueError(
            f"{title} can be read in two ways: as images in folders, or as {join_names(shards, 2)} (choose files "
            f"with --dataset '{pattern.as_posix()}', or move them)"
        )
    suffixes = {name: PurePath(name).suffix.lower() for name in shards}
    suffix = ".parquet" if ".parquet" in suffixes.values() else ".tar"
    used = [name for name in shards if suffixes[name] == suffix]
    unused[_OTHER_SHARDS] = [name for name in shards if name not in used]
    indices = arrange_files(used, title, layout)
    return suffix, {split: [used[index] for index in chosen] for split, chosen in indices.items()}


def _without_empty(unused: dict[str, list[str]]) -> dict[str, list[str]]:
    return {reason: sorted(names) for reason, names in unused.items() if names}


def no_images(title: str, unused: dict[str, list[str]]) -> ValueError:
    """Return the error for a folder without images, which names what is in it."""
    kinds = Counter(PurePath(name).suffix.lower() for names in unused.values() for name in names)
    found = join_names([suffix or "files without suffix" for suffix, _ in kinds.most_common()])
    archives = join_names(unused.get(_PACKED, []), 3)
    remedy = f"; unpack {archives}" if archives else ""
    return ValueError(
        f"{title} has no images{f', only {found}' if found else ''} (expected a folder with images in CLASS/FILE or a "
        f"labels.csv, or .parquet or .tar files; a dataset of save_to_disk: use to_parquet){remedy}"
    )


def _list_all(folder: Path, unused: dict[str, list[str]]) -> list[_Listing]:
    """List a folder level by level; a link to a folder above it is not followed."""
    found: list[_Listing] = []
    level = [("", frozenset[tuple[int, int]]())]  # with the folders above each
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in range(_DEEPEST):
            listed = pool.map(lambda entry: list_directory(folder, entry[0]), level)
            listings = list(tqdm(listed, f"Listing {folder}", len(level), unit=" folders", delay=1))
            below = []
            for listing, (_, above) in zip(listings, level, strict=True):
                if listing.state in above:
                    continue
                if listing.is_output and listing.directory:
                    unused.setdefault(_OUTPUTS, []).append(listing.directory)
                    found.append(listing._replace(directories=[], images=[], others=[]))
                    continue
                found.append(listing)
                inside = above | {listing.state}
                below += [(f"{listing.directory}{name}/", inside) for name in listing.directories]
            level = below
    if level:
        unused[_DEEP] = [name for name, _ in level]
    return found


def list_directory(folder: Path, directory: str) -> _Listing:
    """List one directory, without hidden files and directories whose name begins with two underscores."""
    status = (folder / directory).stat()
    directories, images, others, is_output = [], [], [], False
    with os.scandir(folder / directory) as entries:
        for entry in entries:
            is_output = is_output or entry.name == MARK
            if entry.name.startswith("."):
                continue
            _refuse_undecodable(entry.name)
            if entry.is_dir():
                if not entry.name.startswith("__"):
                    directories.append(entry.name)
            elif is_image_name(entry.name):
                images.append(entry.name)
            else:
                others.append(entry.name)
    state = (status.st_dev, status.st_ino)
    return _Listing(
        directory, status.st_mtime_ns, state, sorted(directories), sorted(images), sorted(others), is_output
    )


def _tree_of(listings: list[_Listing]) -> Folder | None:
    """Return the folder with those of its folders that have images at any depth; None if none has."""
    folders = {listing.directory: Folder(listing.directory, listing.images) for listing in listings}
    for path, folder in sorted(folders.items(), reverse=True):  # the deepest first
        if path and (folder.images or folder.folders):
            parent = path.rstrip("/").rpartition("/")[0]
            folders[f"{parent}/" if parent else ""].folders.append(folder)
    for folder in folders.values():
        folder.folders.sort(key=lambda inner: inner.path)
    root = folders[""]
    return root if root.images or root.folders else None


def _empty_folders(listings: list[_Listing], root: Folder) -> list[str]:
    """Return the folders without images whose parents have images; those inside them are not named."""
    holding = {"": root}
    for folder in _all_folders(root):
        holding[folder.path] = folder
    outputs = {listing.directory for listing in listings if listing.is_output}
    empty = []
    for listing in listings:
        parent = listing.directory.rstrip("/").rpartition("/")[0]
        is_below = (f"{parent}/" if parent else "") in holding
        if listing.directory not in holding and is_below and listing.directory not in outputs:
            empty.append(listing.directory)
    return empty


def _all_folders(folder: Folder) -> Iterator[Folder]:
    yield folder
    for inner in folder.folders:
        yield from _all_folders(inner)


def _write_images(draft: Path, folder: Path, arrangement: Arrangement) -> str:
    """Write an Arrow file for each split, whose rows are sorted by path; return a digest of the names and classes."""
    names = sorted({name for classes in arrangement.splits.values() for name in classes if name is not None})
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
    columns: dict[str, Any] = {"image": datasets.Image()}
    if names:
        columns["label"] = datasets.ClassLabel(names=names)
    schema = datasets.Features(columns).arrow_schema
    digest = hashlib.sha256()
    for split, classes in arrangement.splits.items():
        inner = [(each, name) for name, folders in classes.items() for each in folders]
        with pa.OSFile(str(draft / f"{split}.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
            for each, name in sorted(inner, key=lambda pair: pair[0].path):
                paths = [f"{folder}/{each.path}{file}" for file in each.images]
                labels = [numbers.get(name)] * len(paths)
                digest.update(repr((split, paths, labels)).encode())
                arrays = [pa.array([{"bytes": None, "path": path} for path in paths], schema.field("image").type)]
                if names:
                    arrays.append(pa.array(labels, pa.int64()))
                stream.write_table(pa.table(arrays, schema=schema))
    return digest.hexdigest()[:32]


def is_image_name(name: str) -> bool:
    """Return whether a file with this name is an image; hidden files are not."""
    return os.path.splitext(name)[1].lower() in EXTENSIONS and not name.startswith(".")


def _refuse_undecodable(name: str) -> None:
    """Raise ValueError for a name that Python could not decode: neither an index nor a table can hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the name {os.fsencode(name)!r} is not {sys.getfilesystemencoding()}: rename it, or set PYTHONUTF8=1"
        ) from None
