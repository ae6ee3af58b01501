"""Folders of images as data sets: CLASS/FILE, SPLIT/CLASS/FILE, or labels in a table.

A table is labels.csv, or a metadata.csv of `datasets` with several labels. Of the other folders, an index is stored in
the Hugging Face assets cache: `index.json` (last change of each directory, to see whether the index is still valid)
and, for every split, an Arrow file that later runs and workers map into memory. `datasets` itself reads all other
layouts (with metadata, archives, other depths, or split names in file names).
"""

import csv
import hashlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from filelock import FileLock
from huggingface_hub import cached_assets_path
from tqdm import tqdm

from ..files.image_files import IMAGE_SUFFIXES, is_companion, name_not_taken
from ..files.messages import join_names
from ..files.output import new_folder
from ..files.reading import read_csv, read_text

_THREADS = 16  # for listing directories, which mostly waits for the disk or the network
EXTENSIONS = frozenset(IMAGE_SUFFIXES)
_FOREIGN = (*ImageFolder.METADATA_FILENAMES, ".zip")  # suffixes of files that `datasets` reads besides images
_SPLITS = {
    str(split): re.compile(rf"(?:^|[{NON_WORDS_CHARS}])(?:{'|'.join(words)})(?:[{NON_WORDS_CHARS}]|$)")
    for split, words in SPLIT_KEYWORDS.items()
}
TABLES = {"labels.csv": "image", "metadata.csv": "file_name"}  # file -> its column of paths


class _UnsupportedLayout(Exception):
    """A folder that `datasets` has to read."""


class _Listing(NamedTuple):
    """Images in one directory, whose path is relative to the folder and ends with a slash."""

    directory: str
    changed: int  # nanoseconds
    directories: list[str]
    names: list[str]
    not_taken: list[str]  # suffixes of files that are neither images nor their companions


def load_folder(folder: Path) -> dict[str, datasets.Dataset] | None:
    """Load the splits of a folder of images from its index; a missing or outdated index is made first.

    Returns:
        For each split the columns image (an undecoded path) and label, with rows sorted by path; None for a folder with
        another layout.
    """
    folder = Path(os.path.abspath(folder))
    _refuse_undecodable(str(folder))
    key = json.dumps([str(folder), sorted(EXTENSIONS), "not_taken"])
    cache = cached_assets_path("hf_vit", "folders", hashlib.sha256(key.encode()).hexdigest()[:16])
    index = cache / "index"
    with FileLock(cache / "lock"):
        about = _read_index(index / "index.json", folder)
        if about is None:
            try:
                about = _write_index(index, folder, _list_all(folder))
            except _UnsupportedLayout:
                return None
    name_not_taken(folder, about["not_taken"])
    splits = {split: datasets.Dataset.from_file(str(index / f"{split}.arrow")) for split in about["splits"]}
    for split, samples in splits.items():  # from the images' names, not from the index file
        samples._fingerprint = f"{about['digest']}-{split}"
    return splits


def _read_index(file: Path, folder: Path) -> dict[str, Any] | None:
    """Read an index; None if a directory has changed since it was made."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        with ThreadPoolExecutor(_THREADS) as pool:
            changes = pool.map(lambda name: (folder / name).stat().st_mtime_ns, about["changed"])
            return about if list(changes) == list(about["changed"].values()) else None
    except (OSError, ValueError, KeyError):
        return None


def _list_all(folder: Path) -> list[_Listing]:
    """List a folder level by level."""
    found, level = [], [""]
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in range(3):
            listed = pool.map(lambda name: list_directory(folder, name), level)
            listings = list(tqdm(listed, f"Listing {folder}", len(level), unit=" folders", delay=1))
            found += listings
            level = [f"{listing.directory}{name}/" for listing in listings for name in listing.directories]
    if level:
        raise _UnsupportedLayout
    return found


def list_directory(folder: Path, directory: str) -> _Listing:
    """List one directory, without hidden files and directories whose name begins with two underscores."""
    changed = (folder / directory).stat().st_mtime_ns
    directories, names, not_taken = [], [], []
    with os.scandir(folder / directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            _refuse_undecodable(entry.name)
            if entry.is_dir():
                if not entry.name.startswith("__"):
                    directories.append(entry.name)
            elif _is_image(entry.name):
                names.append(entry.name)
            elif entry.name.lower().endswith(_FOREIGN):
                raise _UnsupportedLayout
            elif not is_companion(entry.name):
                not_taken.append(os.path.splitext(entry.name)[1].lower())
    return _Listing(directory, changed, sorted(directories), sorted(names), not_taken)


def _is_image(name: str) -> bool:
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


def find_splits(name: str) -> list[str]:
    """Return the splits that the name of a folder means, as in `datasets`."""
    return [split for split, pattern in _SPLITS.items() if pattern.search(name)]


def _find_classes(listings: list[_Listing]) -> dict[str, list[tuple[str, _Listing]]]:
    """Return (name, images) of each class by split, as `datasets` finds them, in the order of their paths.

    Raises:
        _UnsupportedLayout: the layout is neither CLASS/FILE nor SPLIT/CLASS/FILE.
    """
    listings = sorted((listing for listing in listings if listing.names), key=lambda listing: listing.directory)
    depths = {listing.directory.count("/") for listing in listings}
    if depths not in ({1}, {2}):
        raise _UnsupportedLayout
    splits: dict[str, list[tuple[str, _Listing]]] = {}
    folders: dict[str, list[str]] = {}  # of each split; none for classes without split
    for listing in listings:
        *outer, name, _ = listing.directory.split("/")
        found = find_splits(outer[0]) if outer else ["train"]
        inner = [name] if outer else [name, *listing.names]
        if len(found) != 1 or any(map(find_splits, inner)) or folders.setdefault(found[0], outer) != outer:
            raise _UnsupportedLayout
        splits.setdefault(found[0], []).append((name, listing))
    if any(len(classes) < 2 for classes in splits.values()):
        raise _UnsupportedLayout
    return splits


def _write_index(index: Path, folder: Path, listings: list[_Listing]) -> dict[str, Any]:
    """Write the index of a folder atomically, and return the content of index.json; rows are sorted by path."""
    splits = _find_classes(listings)
    names = sorted({name for classes in splits.values() for name, _ in classes})
    numbers = {name: number for number, name in enumerate(names)}
    schema = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}).arrow_schema
    digest = hashlib.sha256()
    shutil.rmtree(index, ignore_errors=True)
    with new_folder(index) as draft:
        for split, classes in splits.items():
            with pa.OSFile(str(draft / f"{split}.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
                for name, listing in classes:
                    paths = [f"{folder}/{listing.directory}{file}" for file in listing.names]
                    labels = [numbers[name]] * len(paths)
                    digest.update(repr((split, paths, labels)).encode())
                    images = pa.array([{"bytes": None, "path": path} for path in paths], schema.field("image").type)
                    stream.write_table(pa.table([images, pa.array(labels, pa.int64())], schema=schema))
        changed = {listing.directory: listing.changed for listing in listings}
        not_taken = Counter(chain.from_iterable(listing.not_taken for listing in listings))
        about = {
            "digest": digest.hexdigest()[:32],
            "splits": list(splits),
            "changed": changed,
            "not_taken": not_taken,
        }
        (draft / "index.json").write_text(json.dumps(about), encoding="utf-8")
    return about


def find_table(folder: Path) -> Path | None:
    """Return the table of labels at the top of a folder, if there is one."""
    if (table := folder / "labels.csv").is_file():
        return table
    if not (table := folder / "metadata.csv").is_file():
        return None
    header = next(csv.reader(read_text(table).splitlines()), [])
    return table if {"file_name", "labels"} <= set(header) else None  # `datasets` reads those with one label per image


def load_table(table: Path) -> dict[str, datasets.Dataset]:
    """Load the splits of a folder of images with a table of labels.

    The columns are the path of an image, relative to the folder, and either `labels` (class names separated by ";") or
    one column of 0 and 1 per class. A column `split` is optional; without it, images in `train/`, `val/` or `test/` are
    of that split, and all others of `train`.

    Returns:
        For each split the columns image (an undecoded path) and labels (a list of classes).

    Raises:
        ValueError: the table has other columns, or names an image twice, or one that is not in the folder, or no class,
            or one that does not exist, or lacks an image in the directory of another one.
        OSError: a directory does not exist.
    """
    folder, image_column = os.path.abspath(table.parent), TABLES[table.name]
    header, rows = read_csv(table)
    classes = [name for name in header if name not in (image_column, "split", "labels")]
    is_ambiguous = ("labels" in header) == bool(classes) or "label" in classes
    if image_column not in header or len(set(header)) < len(header) or is_ambiguous:
        raise ValueError(
            f"{table} has the columns {join_names(header) or 'none'} (expected {image_column} and labels, or "
            f"{image_column} and a column for each class; split is optional)"
        )
    labels: dict[str, list[str]] = {}  # by path of the image
    splits: dict[str, list[str]] = {}  # paths
    for number, row in enumerate(rows, start=2):
        image = row[image_column] or ""
        path = os.path.normpath(os.path.join(folder, image))
        marks = [str(row[name]).strip() for name in classes]
        is_whole = None not in row and None not in row.values() and {*marks} <= {"0", "1"}
        if not is_whole or not path.startswith(folder + os.sep) or path in labels:
            raise ValueError(
                f"line {number} of {table} is {join_names(list(map(str, row.values())))} (expected {len(header)} "
                "fields: an image of the folder that is on no other line, and 0 or 1 for each class)"
            )
        if classes:
            labels[path] = [name for name, mark in zip(classes, marks, strict=True) if mark == "1"]
        else:
            found = (name.strip() for name in row["labels"].split(";"))
            labels[path] = list(dict.fromkeys(filter(None, found)))
        splits.setdefault(_split_of(row, image), []).append(path)
    directories = {os.path.dirname(path) for path in labels}
    entries = [entry for directory in directories for entry in os.scandir(directory)]
    files = {entry.path for entry in entries}
    images = {entry.path for entry in entries if _is_image(entry.name)}
    if wrong := sorted((images - labels.keys()) | (labels.keys() - files)):
        raise ValueError(
            f"{table} lacks images of its folder, or names others that do not exist: {join_names(wrong)} (expected a "
            "line for each image, with empty labels if it has none)"
        )
    others = files - {entry.path for entry in entries if entry.is_dir()} - images
    others = [path for path in others if not is_companion(os.path.basename(path))]
    name_not_taken(folder, Counter(os.path.splitext(path)[1].lower() for path in others))
    names = classes or sorted(set(chain(*labels.values())))
    if not names:
        raise ValueError(f"{table} has no labels")
    kind = datasets.List(datasets.ClassLabel(names=names))
    features = datasets.Features({"image": datasets.Image(decode=False), "labels": kind})
    opened = {}
    for split, paths in splits.items():
        paths.sort()
        images = [{"bytes": None, "path": path} for path in paths]
        columns = {"image": images, "labels": [labels[path] for path in paths]}
        opened[split] = datasets.Dataset.from_dict(columns, features=features)
        states = [(path, labels[path], os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]
        opened[split]._fingerprint = hashlib.sha256(repr(states).encode()).hexdigest()[:32]
    return opened


def _split_of(row: dict[str, str], image: str) -> str:
    """Return the split of a row: that of its column, else the one that the image's first folder means, else train."""
    if "split" in row:
        return row["split"].strip()
    first, _, rest = image.partition("/")
    found = find_splits(first) if rest else []
    return found[0] if len(found) == 1 else "train"
