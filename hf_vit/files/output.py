"""Files and folders that appear whole or not at all: written beside their place first, then renamed into it.

They are written in a hidden workplace beside their place, which the process holds a lock on: the workplace of a process
that was killed is cleared by the next one that writes to the same place, and the one of a living process never.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from .contents import refuse_foreign

try:
    import fcntl
except ImportError:  # Windows, where what a killed process left stays
    fcntl = None

_REPLACED = "replaced"  # in a workplace: what the new folder takes the place of


def refuse_existing(path: str | os.PathLike, overwrite: bool) -> None:
    """Raise FileExistsError if `path` exists and may not be overwritten, or is a folder that holds more than ours."""
    if parent := next((str(place) for place in Path(path).parents if place.is_file()), None):
        raise FileExistsError(f"cannot write {path}: {parent} is a file (expected a folder); name another place")
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists; give --overwrite (overwrite=True) to replace it")
    if os.path.isdir(path):
        refuse_foreign(path)


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
    if not overwrite:
        refuse_existing(path, overwrite)
    with _workplace(path) as workplace:
        file = workplace / path.name
        yield file
        _finish(file, workplace, flush)
        os.replace(file, path)
        if flush:
            flush_to_disk(path.parent)


@contextmanager
def new_folder(path: str | os.PathLike, overwrite: bool = False, flush: bool = False) -> Iterator[Path]:
    """A temporary folder that takes the place of `path` when the block ends well, and vanishes when it does not.

    Args:
        flush: wait until it is on the disk, so that a power failure leaves no part of it under this name.

    Raises:
        FileExistsError: `path` exists and may not be overwritten, or holds what this package did not write.
        OSError: it cannot be written; there is no trace of it, and what was at `path` still is.
    """
    path = Path(path)
    with _workplace(path) as workplace:
        _refuse_to_replace(path, overwrite)
        folder = workplace / path.name
        folder.mkdir()
        yield folder
        for entry in (*folder.rglob("*"), folder):
            _finish(entry, workplace, flush)
        _refuse_to_replace(path, overwrite)  # somebody may have put something there meanwhile
        _replace_folder(path, folder, workplace / _REPLACED)
        if flush:
            flush_to_disk(path.parent)


@contextmanager
def new_model_files(folder: str | os.PathLike) -> Iterator[Path]:
    """A temporary folder whose files replace those of the same name in `folder`, which may hold more, in the end.

    The config.json, without which nothing loads, goes first and comes back last: whenever the process is killed,
    `folder` holds the old model, the new one, or none, and never files of both that load together.

    Raises:
        OSError: they cannot be written; `folder` is as it was.
    """
    folder = Path(folder)
    with _workplace(folder) as workplace:
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


def _refuse_to_replace(path: Path, overwrite: bool) -> None:
    """Raise FileExistsError if a folder may not take the place of what is at `path`."""
    refuse_existing(path, overwrite)
    if os.path.lexists(path) and not os.path.isdir(path):
        refuse_foreign(path)


@contextmanager
def _workplace(path: Path) -> Iterator[Path]:
    """A folder beside `path`, on the same disk; it is gone afterwards, also after Ctrl+C."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path)
    workplace = path.with_name(f".{token_hex(4)}.incomplete.{path.name}")
    lock = None
    try:
        lock = _make_locked(workplace)
        yield workplace
    except Exception as error:
        if _is_about_writing(error, workplace):
            raise OSError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
        raise
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _make_locked(workplace: Path) -> int | None:
    """Make a folder and lock it, so that it is cleared by others only when this process has ended.

    Returns:
        What to close in the end; None where the system or the disk has no such locks.
    """
    while True:
        workplace.mkdir(exist_ok=True)
        try:
            lock = _lock(workplace)
        except (BlockingIOError, FileNotFoundError):  # another took it for a leftover just now
            continue
        if lock is None or workplace.exists():
            return lock
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Take the lock of a folder, which ends with the process; None where there are none.

    Raises:
        BlockingIOError: another process has it.
        FileNotFoundError: there is no such folder.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


def _clear_leftovers(path: Path) -> None:
    """Delete workplaces of dead processes that wrote to `path`; a folder that one had moved away comes back."""
    pattern = re.compile(r"\.[0-9a-f]{8}\.incomplete\." + re.escape(path.name))
    for leftover in filter(lambda entry: pattern.fullmatch(entry.name), path.parent.iterdir()):
        with suppress(OSError):  # its process is alive
            if leftover.is_symlink() or (lock := _lock(leftover)) is None:
                continue
            if (leftover / _REPLACED).is_dir() and not os.path.lexists(path):
                (leftover / _REPLACED).rename(path)
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(lock)


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
        flush_to_disk(entry)


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


def flush_to_disk(path: Path) -> None:
    """Ask the system to put a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
