"""Files and folders that appear whole or not at all: written beside their place first, then renamed into it."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any


def refuse_existing(path: str | os.PathLike, overwrite: bool) -> None:
    """Raise FileExistsError if `path` exists and may not be overwritten."""
    if Path(path).exists() and not overwrite:
        raise FileExistsError(f"{path} exists; give --overwrite (overwrite=True) to replace it")


@contextmanager
def new_file(path: str | os.PathLike, overwrite: bool = False, flush: bool = False) -> Iterator[Path]:
    """A temporary file of the same name in another folder; it takes the place of `path` when the block ends well.

    Args:
        flush: wait until it is on the disk, so that a power failure leaves the old file or the new one.

    Raises:
        FileExistsError: `path` exists and may not be overwritten.
        OSError: it cannot be written; there is no trace of it.
    """
    path = Path(path)
    with _workplace(path, overwrite) as workplace:
        file = workplace / path.name
        yield file
        _finish(file, workplace, flush)
        os.replace(file, path)
        if flush:
            _flush(path.parent)


@contextmanager
def new_folder(path: str | os.PathLike, overwrite: bool = False, flush: bool = False) -> Iterator[Path]:
    """A temporary folder that takes the place of `path` when the block ends well, and vanishes when it does not.

    Args:
        flush: wait until it is on the disk, so that a power failure leaves no part of it under this name.

    Raises:
        FileExistsError: `path` exists and may not be overwritten.
        OSError: it cannot be written; there is no trace of it, and what was at `path` still is.
    """
    path = Path(path)
    with _workplace(path, overwrite) as workplace:
        folder = workplace / path.name
        folder.mkdir()
        yield folder
        for entry in (*folder.rglob("*"), folder):
            _finish(entry, workplace, flush)
        _replace_folder(path, folder, workplace / "replaced")
        if flush:
            _flush(path.parent)


@contextmanager
def new_model_files(folder: str | os.PathLike) -> Iterator[Path]:
    """A temporary folder whose files replace those of the same name in `folder`, which may hold more, in the end.

    The config.json, without which nothing loads, goes first and comes back last: whenever the process is killed,
    `folder` holds the old model, the new one, or none, and never files of both that load together.

    Raises:
        OSError: they cannot be written; `folder` is as it was.
    """
    folder = Path(folder)
    with _workplace(folder, overwrite=True) as workplace:
        draft = workplace / folder.name
        draft.mkdir()
        yield draft
        folder.mkdir(exist_ok=True)
        for file in draft.iterdir():
            _finish(file, workplace, flush=False)
        (folder / "config.json").unlink(missing_ok=True)
        for file in sorted(draft.iterdir(), key=lambda file: file.name == "config.json"):
            os.replace(file, folder / file.name)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write or replace a text file: UTF-8 and the line ends of `text`, whatever the system and its locale."""
    with new_file(path, overwrite=True) as file:
        file.write_bytes(text.encode())


def write_json(path: str | os.PathLike, content: Any, *, sort_keys: bool = False) -> None:
    """Write or replace a JSON file, indented by two spaces."""
    write_text(path, json.dumps(content, indent=2, sort_keys=sort_keys) + "\n")


@contextmanager
def _workplace(path: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `path`, on the same disk; it is gone afterwards, also after Ctrl+C."""
    refuse_existing(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    workplace = path.with_name(f".{token_hex(4)}.incomplete.{path.name}")
    try:
        workplace.mkdir()
        yield workplace
    except Exception as error:
        if _is_about_writing(error, workplace):
            raise OSError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
        raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _is_about_writing(error: Exception, workplace: Path) -> bool:
    """A full disk, or no rights: as an OSError of Python, or as the class of its own that safetensors has."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS) or str(workplace) in str(error)
    return "os error" in str(error).lower()


def _finish(entry: Path, workplace: Path, flush: bool) -> None:
    """Let others read a file as the umask has it, with which `workplace` was made; safetensors lets only the owner."""
    if entry.is_file():
        entry.chmod(workplace.stat().st_mode & 0o666)
    if flush:
        _flush(entry)


def _replace_folder(path: Path, folder: Path, replaced: Path) -> None:
    """Move `folder` to `path`, and what was there to `replaced`; back again if that fails or is interrupted."""
    try:
        if path.exists():
            path.rename(replaced)
        folder.rename(path)
    except BaseException:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        raise


def _flush(path: Path) -> None:
    """Ask the system to put a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
