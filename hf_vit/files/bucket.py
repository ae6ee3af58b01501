"""Download of folders from a public bucket, `gs://bucket/folder/`, through Google's JSON API, with a cache."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from filelock import FileLock
from huggingface_hub import cached_assets_path

from . import download
from .download import Fetched, SourceError, fetch
from .limits import MAX_ARRAYS, MAX_CHECKPOINT_BYTES, check_limit
from .messages import shorten
from .reading import read_json_object, read_text

_LATEST = "-LAST"  # big_vision's file NAME-LAST holds the step of the folder NAME-<step>
_OPTIMIZER = re.compile(r"opt(_state)?[~./]")  # beginning of the names of files that hold only an optimizer's state


def is_folder_address(location: str) -> bool:
    """Return whether an address names a folder: it ends with a slash, or is big_vision's NAME-LAST."""
    return location.startswith("gs://") and location.endswith(("/", _LATEST))


def fetch_folder(location: str, cache_dir: str | os.PathLike | None = None) -> Fetched:
    """Download a folder of a public bucket into the cache, without the optimizer's state; a complete folder is reused.

    Args:
        location: `gs://bucket/folder/`, or `gs://bucket/NAME-LAST` for the folder of the step that this file holds.
        cache_dir: folder to use instead of the assets cache.

    Raises:
        SourceError: it does not exist, cannot be reached, or exceeds a limit on files or bytes.
    """
    address = _latest_of(location) if location.endswith(_LATEST) else location
    assets_dir = Path(cache_dir) if cache_dir else None
    address_hash = hashlib.sha256(address.encode()).hexdigest()
    kept = cached_assets_path("hf_vit", "downloads", address_hash, assets_dir=assets_dir) / PurePosixPath(address).name
    with FileLock(f"{kept}.lock"):  # another process may download the same folder
        if not kept.is_dir():
            _assemble(address, kept, cache_dir)
    return Fetched(location, kept)


def _latest_of(location: str) -> str:
    """Return the address of the folder whose step NAME-LAST holds; the file is downloaded every time."""
    with tempfile.TemporaryDirectory() as folder:
        step = read_text(fetch(location, folder).path, max_bytes=100).strip()
    if not step.isdecimal():
        raise SourceError(f"{location} holds {shorten(step)} (expected a step number)")
    return f"{location.removesuffix(_LATEST)}-{step}/"


def _assemble(address: str, kept: Path, cache_dir: str | os.PathLike | None) -> None:
    """Download every file; the folder appears when it is complete."""
    bucket, _, prefix = address.removeprefix("gs://").partition("/")
    files = {name: size for name, size in _list(bucket, prefix) if not _OPTIMIZER.match(name.removeprefix(prefix))}
    if not files:
        raise SourceError(f"{address} does not exist, or holds no files")
    size = sum(files.values())
    check_limit(f"{address} has {size:,} bytes", size, MAX_CHECKPOINT_BYTES, SourceError)
    draft = kept.with_name(f"{kept.name}.incomplete")
    shutil.rmtree(draft, ignore_errors=True)
    for name in files:
        target = draft / _safe(name.removeprefix(prefix), address)
        target.parent.mkdir(parents=True, exist_ok=True)
        file = fetch(f"gs://{bucket}/{name}", cache_dir).path
        try:
            os.link(file, target)
        except OSError:  # a file system without links
            shutil.copyfile(file, target)
    os.replace(draft, kept)


def _list(bucket: str, prefix: str) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) of every file below a folder.

    See https://cloud.google.com/storage/docs/json_api/v1/objects/list.
    """
    token, count = "", 0
    while True:
        query = f"prefix={quote(prefix, safe='')}&pageToken={quote(token, safe='')}"
        url = (
            f"{download.BUCKETS}/storage/v1/b/{quote(bucket, safe='')}/o?fields=items(name,size),nextPageToken&{query}"
        )
        with tempfile.TemporaryDirectory() as folder:  # not the cache: a listing may change
            page: dict[str, Any] = read_json_object(fetch(url, folder, progress=False).path)
        try:
            items = [(str(item["name"]), int(item["size"])) for item in page.get("items", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(f"cannot read the listing of gs://{bucket}/{prefix}: {error!r}") from error
        yield from (item for item in items if not item[0].endswith("/"))  # a name with "/" at its end is a folder
        count += len(items)
        if count > MAX_ARRAYS:
            raise SourceError(f"gs://{bucket}/{prefix} has more than {MAX_ARRAYS:,} files")
        if not (token := str(page.get("nextPageToken") or "")):
            return


def _safe(name: str, address: str) -> str:
    """Return the name after checking that it stays inside the folder."""
    if set(name.split("/")) & {"", ".", ".."} or "\\" in name:
        raise SourceError(f"{address} holds {shorten(name)} (expected names of files inside the folder)")
    return name
