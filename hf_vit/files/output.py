"""Atomic writing of files and folders: they appear complete or not at all, and replace only what we wrote.

They are written in a hidden temporary folder next to their destination, then renamed. The process holds a lock on its
temporary folder. The next process that writes to the same destination deletes those of killed processes, never that of
a living one.

A folder is replaced by two renames: the old one to `.NAME.old`, the new one to `NAME`. If the process is killed between
them, `restore_interrupted` puts the old one back; whatever writes or loads `NAME` calls it first.

A marker, the file `.hf_vit` of a folder, lists what we wrote there, a name a line. A folder with any other file is
neither replaced nor emptied.
"""

import errno
import glob
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from secrets import token_hex
from typing import Any

from .json_files import read_json_object, read_text
from .manifest import MANIFEST, read_manifest, write_manifest
from .messages import join_names
from .readme import is_own_readme

MARK = ".hf_vit"
LOCK = ".lock"  # an empty file that a process locks: in its temporary folder, and in the folder of a training run
_HEADER = "# hf_vit wrote these files. --overwrite deletes them, and refuses a folder that has others."
_PROGRAMS = (".onnx", ".data")  # suffixes of exported programs, which no command reads
_MAX_FOREIGN = 1_000  # files of others in a folder that are counted


def refuse_existing(path: str | os.PathLike, overwrite: bool, by_folder: bool = False) -> None:
    """Raise FileExistsError if `path` exists and may not be overwritten, or is a folder with foreign files.

    Args:
        by_folder: a folder replaces it, so that it may not be a file.
    """
    restore_interrupted(path)
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists; give --overwrite (overwrite=True) to replace it")
    file = Path(path)
    if file.is_file() and file.name in listed_files(file.parent) and file.suffix not in _PROGRAMS:
        raise FileExistsError(f"cannot replace {path}: it is part of the model or run in {file.parent}")
    if by_folder or os.path.isdir(path):
        check_overwritable(path)


def refuse_inputs(output: str | os.PathLike, *inputs: str | os.PathLike | None) -> None:
    """Raise ValueError if an output would replace what a command reads.

    Refused are an output that is an input or contains one, and an existing file in an input folder; a new file or
    folder there is allowed. Symbolic links are followed.

    Args:
        inputs: paths, patterns such as `images/*.png`, or other names such as those on the Hub; None is ignored. What
            an adapter was trained on, its base model, is an input too.
    """
    written = Path(output).resolve()
    for name in inputs:
        for path in _find_inputs(name):
            read = path.resolve()
            if written in (read, *read.parents):
                raise ValueError(f"cannot write {output}: it is {path} or contains it, which is read; choose another")
            if written.is_file() and read in written.parents and written.suffix not in _PROGRAMS:
                raise ValueError(f"cannot replace {output}: it is a file of {path}, which is read; choose another")


def check_results_folder(folder: str | os.PathLike, *inputs: str | os.PathLike | None) -> None:
    """Raise ValueError if results would be written among what is read, or among the files of a model or a run.

    Args:
        inputs: as in `refuse_inputs`.
    """
    refuse_inputs(folder, *inputs)
    if Path(folder, "config.json").is_file() or Path(folder, "checkpoints").is_dir():
        raise ValueError(f"cannot write results to {folder}: it is the folder of a model or a training run")


def _find_inputs(name: str | os.PathLike | None) -> Iterator[Path]:
    """Yield the files and folders that an input means."""
    if name is None:
        return
    path = Path(name)
    if not os.path.lexists(path):
        yield from map(Path, glob.iglob(os.fspath(name), recursive=True))
        return
    yield path
    if (path / "adapter_config.json").is_file():
        base = read_json_object(path / "adapter_config.json").get("base_model_name_or_path")
        if isinstance(base, str) and os.path.exists(base):
            yield Path(base)


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
def own_file(path: str | os.PathLike) -> Iterator[Path]:
    """Write a file of ours into a folder, as `new_file` does; the marker of the folder, if it has one, lists it.

    A file that the user names is the user's own: for it, use `new_file`.
    """
    list_in_marker(path)
    with new_file(path, overwrite=True) as file:
        yield file


@contextmanager
def new_folder(path: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder; it replaces `path` when the block ends without error, otherwise it is deleted.

    Args:
        path: destination.
        overwrite: replace an existing folder of this package.

    Raises:
        FileExistsError: `path` exists and may not be overwritten, or holds files that this package did not write.
        OSError: it cannot be written; nothing of it is left, and `path` is unchanged.
    """
    path = Path(path)
    with _temporary_folder(path) as temporary:
        refuse_existing(path, overwrite, by_folder=True)
        folder = temporary / path.name
        folder.mkdir()
        add_to_marker(folder)
        yield folder
        names = (name for name in _names(folder) if name != MARK and not (folder / name).is_symlink())
        add_to_marker(folder, *(name for name in names if not is_own_readme(folder / name)))
        for entry in (*folder.rglob("*"), folder):
            _finish(entry, temporary)
        refuse_existing(path, overwrite, by_folder=True)  # again: the old folder may have got new files meanwhile
        _replace_folder(path, folder, temporary)


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
        add_to_marker(draft)
        yield draft
        (draft / MARK).unlink()
        readme = folder / "README.md"
        if os.path.lexists(readme) and not is_own_readme(readme):  # the user's own
            (draft / "README.md").unlink(missing_ok=True)
        write_manifest(draft)
        folder.mkdir(exist_ok=True)
        for name in _names(draft):
            list_in_marker(folder / name)
        for file in draft.iterdir():
            _finish(file, temporary)
        last = ("config.json", MANIFEST)
        for name in last:
            (folder / name).unlink(missing_ok=True)
        for file in sorted(draft.iterdir(), key=lambda file: last.index(file.name) if file.name in last else -1):
            if file.is_dir():  # a file is replaced at once, a folder is not
                shutil.rmtree(folder / file.name, ignore_errors=True)
            os.replace(file, folder / file.name)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write or replace a text file, as UTF-8 with the line ends of `text` on every system and in every locale."""
    with own_file(path) as file:
        file.write_bytes(text.encode())


def write_json(path: str | os.PathLike, content: Any, *, sort_keys: bool = False) -> None:
    """Write or replace a JSON file, indented by two spaces."""
    write_text(path, json_text(content, sort_keys=sort_keys))


def json_text(content: Any, *, sort_keys: bool = False) -> str:
    """Return the text of a JSON file, indented by two spaces."""
    return json.dumps(content, indent=2, sort_keys=sort_keys) + "\n"


def restore_interrupted(path: str | os.PathLike) -> None:
    """Put a folder back that a killed process had moved aside, if `path` does not exist; otherwise do nothing."""
    if os.path.lexists(path):
        return
    old = _moved_aside(path)
    if any(os.path.isfile(old / name) for name in (MARK, MANIFEST)):
        os.replace(old, path)


def _moved_aside(path: str | os.PathLike) -> Path:
    """Return the path to which a folder is moved before another replaces it."""
    folder = Path(os.path.abspath(path))
    return folder.with_name(f".{folder.name}.old")


def _replace_folder(path: Path, folder: Path, temporary: Path) -> None:
    """Replace `path` by `folder`; an error or interrupt leaves either the old folder or the new one."""
    old = _moved_aside(path)
    if os.path.lexists(old):  # left by a process that was killed after the second rename
        check_overwritable(old)
        os.replace(old, temporary / "earlier")
    try:
        if path.exists():
            os.replace(path, old)
        os.replace(folder, path)
    except BaseException:
        restore_interrupted(path)
        raise
    with suppress(FileNotFoundError):  # there was no folder, or another process is writing to the same path
        os.replace(old, temporary / "replaced")


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path`, on the same disk; it is deleted afterward, also after Ctrl+C."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{token_hex(4)}.incomplete.{path.name}")
    lock = None
    try:
        if find_spec("filelock") is None:  # which exported programs do not need; leftovers are then kept
            temporary.mkdir()
        else:
            clear_leftovers(path)
            lock = _make_locked(temporary)
        yield temporary
    except Exception as error:
        is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
        is_ours = is_full or (isinstance(error, OSError) and str(temporary) in str(error))
        if is_ours or "os error" in str(error).lower():  # of safetensors, whose errors are no OSError
            raise OSError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
        raise
    finally:
        if lock is not None:
            lock.release()
        shutil.rmtree(temporary, ignore_errors=True)


def _make_locked(folder: Path) -> Any:
    """Make a folder that this process locks; return the lock."""
    from filelock import FileLock  # not at the top: the import is slow

    lock = FileLock(folder / LOCK)
    while not lock.is_locked:
        folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another process has deleted it as a leftover
            lock.acquire()
    return lock


def clear_leftovers(path: Path) -> None:
    """Delete temporary folders of dead processes that wrote to `path`."""
    from filelock import FileLock

    pattern = re.compile(r"\.[0-9a-f]{8}\.incomplete\." + re.escape(path.name))
    for leftover in filter(lambda entry: pattern.fullmatch(entry.name), path.parent.iterdir()):
        if not leftover.is_symlink():
            with suppress(OSError), FileLock(leftover / LOCK, timeout=0):  # TimeoutError: its process is alive
                shutil.rmtree(leftover, ignore_errors=True)


def _finish(entry: Path, temporary: Path) -> None:
    """Give a file the permissions of the umask, as `temporary` has them; safetensors lets only the owner read."""
    if entry.is_file():
        entry.chmod(temporary.stat().st_mode & 0o666)


def flush_to_disk(path: Path) -> None:
    """Ask the system to write a file, or the entries of a folder, to the disk; Windows opens no folders."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def add_to_marker(folder: Path, *names: str) -> None:
    """List files in the marker of a folder, which is created if it is missing.

    Args:
        names: paths relative to `folder`, with slashes; `*` and `?` stand for any characters, for files that appear
            later.
    """
    marker = folder / MARK
    known = _names_in(marker)
    lines = sorted(set(names) - known)
    is_text = marker.is_file() and not marker.read_bytes().startswith(b"{")
    if not is_text:
        lines = [_HEADER, *sorted(known), *lines]
    with open(marker, "ab" if is_text else "wb") as file:
        file.write(b"".join(os.fsencode(line) + b"\n" for line in lines))


def list_in_marker(path: str | os.PathLike) -> None:
    """List a file of ours in the marker of the nearest folder above it that has one.

    A README.md is ours by its content, see `is_own_readme`.
    """
    path = Path(os.path.abspath(path))
    for folder in path.parents:
        if (folder / MARK).is_file():
            if path.name != "README.md":
                add_to_marker(folder, path.relative_to(folder).as_posix())
            return


def listed_files(folder: Path) -> set[str]:
    """Return the names in the marker and in the manifest of a folder, both included; empty if it has neither."""
    return _names_in(folder / MARK) | _names_in(folder / MANIFEST)


def _names_in(marker: Path) -> set[str]:
    """Return the names in a marker or manifest, and its own; earlier versions wrote markers like manifests."""
    if marker.is_symlink() or not marker.is_file():
        return set()
    if marker.name == MARK and not marker.read_bytes().startswith(b"{"):
        lines = os.fsdecode(marker.read_bytes()).split("\n")
        return {MARK, *(line for line in lines if line and not line.startswith("#"))}
    try:
        listed = read_manifest(read_text(marker))
    except ValueError:
        listed = None
    return set() if listed is None else {marker.name, *listed}


def check_overwritable(folder: str | os.PathLike, linked: str = "") -> None:
    """Refuse a folder that holds anything that this package did not write; an empty folder is accepted.

    Args:
        linked: name of a folder in it that may be a symbolic link to one elsewhere.

    Raises:
        FileExistsError: it is not a folder, or holds a foreign file; nothing was changed.
    """
    folder = Path(folder)
    if folder.is_symlink() or not folder.is_dir():
        raise FileExistsError(f"cannot replace {folder}: it is a file or a symbolic link; nothing was changed")
    ours = listed_files(folder) | {LOCK}
    patterns = [name for name in ours if "*" in name or "?" in name]

    def is_foreign(name: str) -> bool:
        is_listed = name in ours or any(fnmatchcase(name, pattern) for pattern in patterns)
        return not is_listed and not is_own_readme(folder / name)

    names = (name for name in _names(folder) if name != linked)
    if (folder / linked).is_symlink() and (folder / linked).is_dir():
        names = chain(names, (f"{linked}/{name}" for name in _names(folder / linked)))
    if foreign := sorted(islice(filter(is_foreign, names), _MAX_FOREIGN)):  # a home folder has millions
        raise FileExistsError(
            f"cannot replace {folder}: it has files that hf_vit did not write: {join_names(foreign)}. Nothing was "
            "changed; move them away, delete the folder, or choose another one"
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
