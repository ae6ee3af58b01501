"""Atomic writing of files and folders: they appear complete or not at all, and replace only what we wrote.

They are written in a hidden temporary folder next to their destination, then renamed. The process holds a lock on its
temporary folder. The next process that writes to the same destination deletes those of killed processes, never that of
a living one.

A marker lists what was written into a folder; nothing else in it is replaced or deleted. The marker is `.hf_vit`, or in
a folder of a model its `manifest.json`, both as in `models.utils.manifest_text`.
"""

import ctypes
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from itertools import chain, islice
from pathlib import Path
from secrets import token_hex
from typing import Any

from ..models.utils import MANIFEST, manifest_entry, manifest_text, read_manifest, read_text
from .messages import join_names
from .readme import is_own_readme

_LOCK, _REPLACED = ".lock", "replaced"  # in a temporary folder: the file that its process locks, the old folder
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
MARK = ".hf_vit"
LOCK = ".lock"  # an empty file that a training run locks
_HASHED = 2**20  # bytes; larger files are hashed only if they are newer than the marker
_MAX_FOREIGN = 1_000  # files of others in a folder that are counted
# Of a training run, for its card.
REPORTS = ("metrics.json", "card_data.json", "learning_curve.png", "confusion_matrix.png", "recipe.yaml")
REPORTS += ("calibration.json",)
# The only files of a folder that are pushed to the Hub, besides code that its `auto_map` names.
PUSHED = (
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"),
    *("config.json", "preprocessor_config.json", "conversion.json"),
    *("program.xml", "program.bin", "quantization.json"),
    *("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"),  # of sentence-transformers
    *REPORTS,
    *("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "*.onnx", "*.onnx.data"),
)


def refuse_existing(path: str | os.PathLike, overwrite: bool, by_folder: bool = False) -> None:
    """Raise FileExistsError if `path` exists and may not be overwritten, or is a folder with foreign files.

    Args:
        by_folder: a folder replaces it, so that it may not be a file.
    """
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists; give --overwrite (overwrite=True) to replace it")
    if by_folder or os.path.isdir(path):
        check_overwritable(path)


@contextmanager
def new_file(path: str | os.PathLike, overwrite: bool = False, flush: bool = False) -> Iterator[Path]:
    """Yield a temporary path with the name of `path`; when the block ends without error, its file replaces `path`.

    Args:
        path: destination.
        overwrite: replace an existing file.
        flush: wait until the file is on the disk, so that a power failure leaves either the old file or the new one.

    Raises:
        FileExistsError: `path` exists and may not be overwritten.
        OSError: it cannot be written; nothing of it is left.
    """
    path = Path(path)
    if not overwrite:
        refuse_existing(path, overwrite)
    with _temporary_folder(path) as temporary:
        file = temporary / path.name
        yield file
        _finish(file, temporary)
        if flush:
            flush_to_disk(file)
        os.replace(file, path)
        if flush:
            flush_to_disk(path.parent)


@contextmanager
def new_folder(path: str | os.PathLike, overwrite: bool = False, marker: str | None = MARK) -> Iterator[Path]:
    """Yield a temporary folder; it replaces `path` when the block ends without error, otherwise it is deleted.

    Args:
        path: destination.
        overwrite: replace an existing folder of this package.
        marker: name of the file that lists what was written, without which the folder is never replaced; None: no file.

    Raises:
        FileExistsError: `path` exists and may not be overwritten, or holds files that this package did not write.
        OSError: it cannot be written; nothing of it is left, and `path` is unchanged.
    """
    path = Path(path)
    with _temporary_folder(path) as temporary:
        refuse_existing(path, overwrite, by_folder=True)
        folder = temporary / path.name
        folder.mkdir()
        yield folder
        if marker is not None:
            write_marker(folder, marker)
        for entry in (*folder.rglob("*"), folder):
            _finish(entry, temporary)
        refuse_existing(path, overwrite, by_folder=True)  # again: the old folder may have got new files meanwhile
        _replace_folder(path, folder, temporary / _REPLACED)


@contextmanager
def new_model_files(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary folder whose files finally replace those of the same name in `folder`; other files stay.

    The old config.json, without which nothing loads, is deleted first; the new one is moved last, before the manifest.
    If the process is killed at any moment, `folder` holds the old model, the new model or no loadable model, never a
    mixture that loads.

    Raises:
        OSError: they cannot be written; `folder` is unchanged.
    """
    folder = Path(folder)
    with _temporary_folder(folder) as temporary:
        draft = temporary / folder.name
        draft.mkdir()
        yield draft
        folder.mkdir(exist_ok=True)
        write_marker(draft, MANIFEST)
        for file in draft.iterdir():
            _finish(file, temporary)
        last = ("config.json", MANIFEST)
        for name in last:
            (folder / name).unlink(missing_ok=True)
        for file in sorted(draft.iterdir(), key=lambda file: last.index(file.name) if file.name in last else -1):
            os.replace(file, folder / file.name)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write or replace a text file, as UTF-8 with the line ends of `text` on every system and in every locale."""
    with new_file(path, overwrite=True) as file:
        file.write_bytes(text.encode())


def write_json(path: str | os.PathLike, content: Any, *, sort_keys: bool = False) -> None:
    """Write or replace a JSON file, indented by two spaces."""
    write_text(path, json_text(content, sort_keys=sort_keys))


def json_text(content: Any, *, sort_keys: bool = False) -> str:
    """Return the text of a JSON file, indented by two spaces."""
    return json.dumps(content, indent=2, sort_keys=sort_keys) + "\n"


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path`, on the same disk; it is deleted afterward, also after Ctrl+C."""
    from filelock import FileLock  # not at the top: the import is slow

    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path)
    temporary = path.with_name(f".{token_hex(4)}.incomplete.{path.name}")
    lock = FileLock(temporary / _LOCK)
    try:
        while not lock.is_locked:
            temporary.mkdir(exist_ok=True)
            with suppress(FileNotFoundError):  # another process has deleted it as a leftover
                lock.acquire()
        yield temporary
    except Exception as error:
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        is_ours = is_full or (isinstance(error, OSError) and str(temporary) in str(error))
        if is_ours or "os error" in str(error).lower():  # of safetensors, whose errors are no OSError
            raise OSError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
        raise
    finally:
        lock.release()
        shutil.rmtree(temporary, ignore_errors=True)


def _clear_leftovers(path: Path) -> None:
    """Delete temporary folders of dead processes that wrote to `path`, except the only copy of an old folder."""
    from filelock import FileLock

    pattern = re.compile(r"\.[0-9a-f]{8}\.incomplete\." + re.escape(path.name))
    for leftover in filter(lambda entry: pattern.fullmatch(entry.name), path.parent.iterdir()):
        is_only_copy = (leftover / _REPLACED).is_dir() and not os.path.lexists(path)
        if not leftover.is_symlink() and not is_only_copy:
            with suppress(OSError), FileLock(leftover / _LOCK, timeout=0):  # TimeoutError: its process is alive
                shutil.rmtree(leftover, ignore_errors=True)


def _finish(entry: Path, temporary: Path) -> None:
    """Give a file the permissions of the umask, as `temporary` has them; safetensors lets only the owner read."""
    if entry.is_file():
        entry.chmod(temporary.stat().st_mode & 0o666)


def _replace_folder(path: Path, folder: Path, replaced: Path) -> None:
    """Exchange `folder` with `path`, at once where the system can.

    Elsewhere, `path` is moved to `replaced`, then `folder` to `path`; an error or interrupt undoes the first move.
    """
    if exchange_folders(folder, path):
        return
    try:
        if path.exists():
            path.rename(replaced)
        folder.rename(path)
    except BaseException:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        raise


def exchange_folders(folder: Path, other: Path) -> bool:
    """Exchange two folders in one step, so that no reader ever finds neither; False where that is not possible."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # glibc 2.28, musl 1.2.4
    paths = (_AT_FDCWD, os.fsencode(folder), _AT_FDCWD, os.fsencode(other))
    return renameat2 is not None and renameat2(*paths, _RENAME_EXCHANGE) == 0


def flush_to_disk(path: Path) -> None:
    """Ask the system to write a file, or the entries of a folder, to the disk; Windows opens no folders."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name, or a path with slashes, matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def write_marker(folder: Path, marker: str = MARK) -> None:
    """Write the marker of a folder: its files, with size and hash. A manifest omits README.md, which people edit."""
    unlisted = (LOCK, MARK, MANIFEST, *(["README.md"] if marker == MANIFEST else []))
    names = [name for name in _names(folder) if name not in unlisted and not (folder / name).is_symlink()]
    (folder / marker).write_text(manifest_text({name: manifest_entry(folder / name) for name in names}), "utf-8")


def check_overwritable(folder: str | os.PathLike, known: tuple[str, ...] = (), linked: str = "") -> None:
    """Refuse a folder that holds anything that this package did not write; an empty folder is accepted.

    Args:
        known: patterns of further names, which a program writes over time into a folder that it has marked.
        linked: name of a folder in it that may be a symbolic link to one elsewhere.

    Raises:
        FileExistsError: it is not a folder, or holds a foreign or changed file; nothing was changed.
    """
    folder = Path(folder)
    if folder.is_symlink() or not folder.is_dir():
        raise FileExistsError(f"cannot replace {folder}: it is a file or a symbolic link; nothing was changed")
    ours = _unchanged(folder / MARK) | _unchanged(folder / MANIFEST) | {LOCK}
    known = known if MARK in ours else ()

    def is_foreign(name: str) -> bool:
        return not (name in ours or matches(name, known) or is_own_readme(folder / name))

    names = (name for name in _names(folder) if name != linked)
    if (folder / linked).is_symlink() and (folder / linked).is_dir():
        names = chain(names, (f"{linked}/{name}" for name in _names(folder / linked)))
    if foreign := sorted(islice(filter(is_foreign, names), _MAX_FOREIGN)):  # a home folder has millions
        raise FileExistsError(
            f"cannot replace {folder}: it has files that hf_vit did not write, or that were changed since: "
            f"{join_names(foreign)}. Nothing was changed; move them away, delete the folder, or choose another one"
        )


def check_no_model(folder: str | os.PathLike) -> None:
    """Refuse a folder that holds weights, for an output without weights.

    Raises:
        FileExistsError: it holds weights; nothing was changed.
    """
    if weights := sorted(Path(folder).rglob("*.safetensors")):
        raise FileExistsError(f"cannot replace {folder}: it holds a model ({weights[0].name}); nothing was changed")


def _names(folder: Path) -> Iterator[str]:
    """Yield all entries below a folder except folders, as paths with slashes; links to folders are not followed."""
    for parent, folders, files in os.walk(folder):
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(parent, name)))):
            yield Path(parent, name).relative_to(folder).as_posix()


def _unchanged(marker: Path) -> set[str]:
    """Return the name of a marker, and of the files that it lists and that are still as they were written."""
    try:
        listed = None if marker.is_symlink() or not marker.is_file() else read_manifest(read_text(marker))
    except ValueError:
        listed = None
    if listed is None:
        return set()
    found, written = {marker.name}, marker.stat().st_mtime_ns
    for name, entry in listed.items():
        file = marker.parent / name
        if file.is_symlink() or not file.is_file() or (status := file.stat()).st_size != entry["size"]:
            continue
        if (status.st_size > _HASHED and status.st_mtime_ns <= written) or manifest_entry(file) == entry:
            found.add(name)
    return found
