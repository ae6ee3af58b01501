"""The cache of conversions: each checkpoint of another library is converted once.

The cache is `hf_vit/converted` in `HF_ASSETS_CACHE`. The key of an entry is the content of the checkpoint (of a
released file its address), the options, the version of the package, and `CONVERSION_VERSION`. An entry holds the
converted folder, and a file with what the conversion said. Entries of other versions are not used. The cache may be
deleted at any time.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import Handler, LogRecord
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock
from huggingface_hub import cached_assets_path
from transformers.utils import logging

from ..files.download import sha256_at
from ..files.manifest import sha256_of
from ..files.reading import read_json, read_json_object
from ..files.versions import versions_of
from ..models.pretrained import CONVERSION_RECORD
from .checkpoint import fetch_any
from .converting import CONVERSION_VERSION, convert
from .recognition import check_model_type

logger = logging.get_logger(__name__)
_STATEMENTS = "statements.json"


def convert_into_cache(
    location: str, where: Mapping[str, Any], model_type: str | None, options: Mapping[str, Any]
) -> Path:
    """Return the converted folder of a checkpoint; convert it, unless the cache has it.

    What the conversion assumed or did not use is said in one warning, once in a process.

    Args:
        location: path, address or name.
        where: arguments of `from_pretrained` that locate files, such as `revision`.
        model_type: that of its config.json; None without one.
        options: arguments of `convert`.

    Raises:
        ValueError: it is of an unknown architecture, or a file is damaged.
        OSError: it cannot be found or downloaded, or the cache cannot be written.
    """
    check_model_type(location, model_type)  # before the weights are downloaded
    of_snapshot = {name: value for name, value in where.items() if name != "subfolder"}
    subfolder = where.get("subfolder") or ""
    local = Path(location, subfolder).expanduser()
    if local.exists():
        location = str(local)
    elif subfolder:
        raise ValueError(f"cannot convert the subfolder {subfolder} of {location}: download it, and give its folder")
    public_name = local.name if local.exists() else location
    path = None
    content = ""
    if not location.startswith("gs://"):  # whose files do not change
        path = fetch_any(location, of_snapshot).path
        content = _content_of(path)
    about = f"{public_name} {content} {versions_of(('hf_vit',))} {CONVERSION_VERSION}"
    if options:
        about += f" {json.dumps(options, sort_keys=True)}"
    with _explain_unwritable():
        entry = cached_assets_path("hf_vit", "converted", hashlib.sha256(about.encode()).hexdigest())
    folder = entry / PurePosixPath(location.rstrip("/")).name
    if not folder.exists():  # else complete, since it appeared at once
        lock = FileLock(f"{folder}.lock")  # another process may convert the same checkpoint
        with _explain_unwritable():
            lock.acquire()
        try:
            if not folder.exists():
                _convert(location, of_snapshot, options, path, folder)
        finally:
            lock.release()
    statements = read_json(entry / _STATEMENTS)
    if statements:
        logger.warning_once(f"{public_name}: {'; '.join(statements)}")
    return folder


def _convert(
    location: str, where: Mapping[str, Any], options: Mapping[str, Any], path: Path | None, folder: Path
) -> None:
    """Convert a checkpoint, of which `path` is the local file or folder, into a new folder of the cache."""
    with _collect_warnings() as statements:
        record = None if path is None else _record_beside(path)
        conversion = convert(location, read_weights=record is not None, where=where, **options)
        if record is not None and record.get("fingerprint") == conversion.record["fingerprint"]:
            conversion.model.conversion_record = record
        statements += [f"assumed: {reason}" for reason in conversion.record["assumed"]]
        (folder.parent / _STATEMENTS).write_text(json.dumps(statements))
        conversion.save(folder)


class _Collector(Handler):
    def __init__(self):
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def _collect_warnings() -> Iterator[list[str]]:
    """Collect the warnings of this room in a list, instead of printing them."""
    collector = _Collector()
    room = logging.get_logger(__package__)
    room.addHandler(collector)
    room.propagate = False
    try:
        yield collector.messages
    finally:
        room.propagate = True
        room.removeHandler(collector)


def _content_of(path: Path) -> str:
    """Return the SHA-256 of what a conversion reads: a file, a folder of arrays, or the files beside a config.json."""
    if not (path / "config.json").is_file():
        return sha256_at(path)
    files = sorted(file for file in path.iterdir() if file.is_file())
    lines = [f"{sha256_of(file)}  {file.name}\n" for file in files]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _record_beside(path: Path) -> dict[str, Any] | None:
    """Return the conversion.json of a folder of transformers that hf_vit wrote; None for any other checkpoint."""
    file = path / CONVERSION_RECORD
    return read_json_object(file) if (path / "config.json").is_file() and file.is_file() else None


@contextmanager
def _explain_unwritable() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise OSError(
            f"cannot cache the converted model: {error}; set HF_ASSETS_CACHE to a folder that can be written, or use "
            "the folder that `hf-vit convert` writes"
        ) from error
