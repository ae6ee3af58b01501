"""Files that appear when they are complete."""

import os
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
        if isinstance(error, OSError) or "os error" in str(error).lower():  # safetensors has a class of its own
            raise OSError(f"{path} cannot be written: {error}") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
