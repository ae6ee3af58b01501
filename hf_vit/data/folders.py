"""Index of a folder of images, CLASS/FILE or SPLIT/CLASS/FILE; later runs and workers map it into memory.

The index lies in the Hugging Face assets cache: `index.parquet` (split, path, label, size and time of every image),
`directories.json` (last change of each directory, to see whether the index is still valid) and, for every split, an
Arrow file that `datasets` maps into memory. `datasets` itself reads all other folders (with metadata, archives, other
depths, or split names in file names).
"""

import hashlib
import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from filelock import FileLock
from huggingface_hub import cached_assets_path
from tqdm import tqdm

from ..files.image_files import IMAGE_SUFFIXES
from ..files.output import new_folder

_THREADS = 16  # for listing directories, which mostly waits for the disk or the network
_BATCH = 10_000  # rows per write to an Arrow file
_INDEX_SCHEMA = pa.schema(
    {"split": pa.string(), "path": pa.string(), "label": pa.int32(), "size": pa.int64(), "time": pa.int64()}
)
EXTENSIONS = frozenset({*ImageFolder.EXTENSIONS, *IMAGE_SUFFIXES})
_FOREIGN = (*ImageFolder.METADATA_FILENAMES, ".zip")  # suffixes of files that `datasets` reads besides images
_SPLITS = {
    str(split): re.compile(rf"(?:^|[{NON_WORDS_CHARS}])(?:{'|'.join(words)})(?:[{NON_WORDS_CHARS}]|$)")
    for split, words in SPLIT_KEYWORDS.items()
}


class _Unsuitable(Exception):
    """A folder that `datasets` has to read."""


class _Listing(NamedTuple):
    """Images in one directory, whose path is relative to the folder."""

    directory: str
    changed: int  # nanoseconds
    directories: list[str]
    names: list[str]
    sizes: list[int]
    times: list[int]


def load_folder(folder: Path) -> dict[str, datasets.Dataset] | None:
    """Load the splits of a folder of images from its index; a missing or outdated index is made first.

    Returns:
        For each split the columns image (an undecoded path) and label, with rows sorted by path; None for a folder with
        another layout.
    """
    folder = Path(os.path.abspath(folder))
    _refuse_undecodable(str(folder))
    key = json.dumps([str(folder), sorted(EXTENSIONS)])
    place = cached_assets_path("hf_vit", "folders", hashlib.sha256(key.encode()).hexdigest()[:16])
    with FileLock(place / "lock"):
        index = place / "index"
        if not _holds(index, folder):
            try:
                listings = _list_all(folder, place / "listing.jsonl")
                _write_index(index, folder, listings)
            except _Unsuitable:
                return None
            finally:
                if index.exists():
                    (place / "listing.jsonl").unlink(missing_ok=True)
    about = json.loads((index / "directories.json").read_text(encoding="utf-8"))
    splits = {split: datasets.Dataset.from_file(str(index / f"{split}.arrow")) for split in about["splits"]}
    for split, samples in splits.items():  # from the images' names, sizes and times, not from the index file
        samples._fingerprint = f"{about['digest']}-{split}"
    return splits


def _holds(index: Path, folder: Path) -> bool:
    """Tell whether an index is valid: no directory has changed since it was made."""
    try:
        known = json.loads((index / "directories.json").read_text(encoding="utf-8"))["changed"]
    except (OSError, ValueError, KeyError):
        return False
    with ThreadPoolExecutor(_THREADS) as pool:
        return all(pool.map(lambda item: _changed(folder / item[0]) == item[1], known.items()))


def _changed(directory: Path) -> int:
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return -1


def _list_all(folder: Path, log: Path) -> list[_Listing]:
    """List a folder level by level; directories in the log of a killed process are not listed again."""
    done: dict[str, _Listing] = {}
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        with suppress(ValueError, TypeError):  # the last line may be incomplete
            listing = _Listing(*json.loads(line))
            done[listing.directory] = listing
    found: list[_Listing] = []
    with ThreadPoolExecutor(_THREADS) as pool, open(log, "a", buffering=1, encoding="utf-8") as lines:
        bar = tqdm(desc=f"Listing {folder}", unit=" images", unit_scale=True, delay=1)
        level = [""]
        for depth in range(4):
            if depth == 3 and level:
                raise _Unsuitable
            todo = [name for name in level if name not in done or _changed(folder / name) != done[name].changed]
            for listing in pool.map(lambda name: _list(folder, name), todo):
                done[listing.directory] = listing
                lines.write(json.dumps(listing) + "\n")
                bar.update(len(listing.names))
            listings = [done[name] for name in level]
            found += listings
            level = [f"{listing.directory}{name}/" for listing in listings for name in listing.directories]
        bar.close()
    return found


def _list(folder: Path, directory: str) -> _Listing:
    """List one directory, without hidden files and directories whose name begins with two underscores."""
    changed = _changed(folder / directory)
    directories, images = [], []
    with os.scandir(folder / directory) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if not entry.name.isascii():
                _refuse_undecodable(entry.name)
            if entry.is_dir():
                if not entry.name.startswith("__"):
                    directories.append(entry.name)
            elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
                status = entry.stat()
                images.append((entry.name, status.st_size, status.st_mtime_ns))
            elif entry.name.lower().endswith(_FOREIGN):
                raise _Unsuitable
    names, sizes, times = zip(*sorted(images), strict=True) if images else ((), (), ())
    return _Listing(directory, changed, sorted(directories), list(names), list(sizes), list(times))


def _refuse_undecodable(name: str) -> None:
    """Raise ValueError for a name that Python could not decode: neither an index nor a table can hold it."""
    try:
        name.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        raise ValueError(
            f"the name {os.fsencode(name)!r} is not {encoding}: rename it"
            + ("" if encoding == "utf-8" else ", or set the variable PYTHONUTF8=1")
        ) from None


def _splits_of(listings: list[_Listing]) -> dict[str, list[_Listing]]:
    """Class directories by split, as `datasets` finds them; raise _Unsuitable for any unclear layout."""
    classes = [listing for listing in listings if listing.names]
    paths = [listing.directory.split("/")[:-1] for listing in classes]  # [class] or [split, class]
    depths = {len(path) for path in paths}
    found = [_find_splits("".join(path[:1])) for path in paths]
    if depths == {1} and not any(found):
        inner = [name for listing in classes for name in listing.names]
        splits = {"train": classes}
    elif depths == {2} and all(len(names) == 1 for names in found):
        inner = [name for _, name in paths]
        splits = {names[0]: [] for names in found}
        for names, listing in zip(found, classes, strict=True):
            splits[names[0]].append(listing)
        if len({tuple(path[:1]) for path in paths}) > len(splits):  # several folders of one split
            raise _Unsuitable
    else:
        raise _Unsuitable
    if any(map(_find_splits, inner)) or any(len(part) < 2 for part in splits.values()):
        raise _Unsuitable
    return splits


def _find_splits(name: str) -> list[str]:
    return [split for split, pattern in _SPLITS.items() if pattern.search(name)]


def _write_index(index: Path, folder: Path, listings: list[_Listing]) -> None:
    """Write the index of a folder atomically; rows are sorted by path."""
    splits = _splits_of(listings)
    classes = sorted({_class_of(listing) for part in splits.values() for listing in part})
    schema = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=classes)}).arrow_schema
    numbers = {name: number for number, name in enumerate(classes)}
    digest = hashlib.sha256()
    shutil.rmtree(index, ignore_errors=True)
    with new_folder(index) as draft:
        with pq.ParquetWriter(draft / "index.parquet", _INDEX_SCHEMA) as writer:
            for split, part in splits.items():
                rows = (
                    (f"{folder}/{listing.directory}{name}", numbers[_class_of(listing)], size, time)
                    for listing in sorted(part, key=lambda listing: listing.directory)
                    for name, size, time in zip(listing.names, listing.sizes, listing.times, strict=True)
                )
                with pa.OSFile(str(draft / f"{split}.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
                    while batch := list(islice(rows, _BATCH)):
                        paths, labels, sizes, times = map(list, zip(*batch, strict=True))
                        digest.update(repr((split, paths, labels, sizes, times)).encode())
                        columns = [[split] * len(batch), paths, labels, sizes, times]
                        writer.write_table(pa.table(columns, schema=_INDEX_SCHEMA))
                        images = pa.array([{"bytes": None, "path": path} for path in paths], schema.field("image").type)
                        stream.write_table(pa.table([images, pa.array(labels, pa.int64())], schema=schema))
        changed = {listing.directory: listing.changed for listing in listings}
        content = {"digest": digest.hexdigest()[:32], "splits": list(splits), "changed": changed}
        (draft / "directories.json").write_text(json.dumps(content), encoding="utf-8")


def _class_of(listing: _Listing) -> str:
    return listing.directory.split("/")[-2]
