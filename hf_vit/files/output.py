"""Files and folders that appear when they are complete."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_existing(path: str | os.PathLike, overwrite: bool) -> None:
    if Path(path).exists() and not overwrite:
        raise FileExistsError(f"{path} exists; give --overwrite (overwrite=True) to replace it")


@contextmanager
def new_file(path: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """A temporary file with the same suffix that takes the place of `path` when the block ends well.

    Raises:
        FileExistsError: `path` exists and may not be overwritten.
        OSError: it cannot be written; there is no trace of it.
    """
    path = Path(path)
    refuse_existing(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}.incomplete.{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    except Exception as error:
        if _is_about_writing(error, temporary):
            raise OSError(f"{path} cannot be written: {error}") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(output: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder that takes the place of `output` when the block ends well, and vanishes when it does not.

    Raises:
        FileExistsError: `output` exists and may not be overwritten.
    """
    output = Path(output)
    refuse_existing(output, overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        for file in temporary.iterdir():  # safetensors makes files that only their owner may read
            file.chmod((0o777 if file.is_dir() else 0o666) & ~_umask())
        _replace(output, temporary)
    except Exception as error:
        if _is_about_writing(error, temporary):
            raise OSError(f"{output} cannot be written: {error}") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_about_writing(error: Exception, temporary: Path) -> bool:
    """A full disk, or no rights: as an OSError of Python, or as the class of its own that safetensors has."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS) or str(temporary) in str(error)
    return "os error" in str(error).lower()


def _replace(output: Path, temporary: Path) -> None:
    if not output.exists():
        temporary.rename(output)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent)) / "old"
    output.rename(old)
    temporary.rename(output)
    shutil.rmtree(old.parent)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
