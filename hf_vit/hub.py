"""Saving and loading folders."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from transformers import AutoConfig

from . import modeling_hf_vit as modeling
from .auto import register_auto_classes


def load_model(folder: str | os.PathLike) -> modeling.HfViTPreTrainedModel:
    """Load a model as the class that it was saved as, which the Auto classes cannot know.

    Raises:
        ValueError: the folder holds a model of another package.
    """
    register_auto_classes()
    config = AutoConfig.from_pretrained(folder)
    name = (config.architectures or ["nothing"])[0]
    package = import_module(__package__)
    if name not in package.__all__:
        raise ValueError(f"{folder} holds {name}, which is not a model of hf_vit")
    return getattr(package, name).from_pretrained(folder)


@contextmanager
def new_folder(output: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder that takes the place of `output` when the block ends well, and vanishes when it does not.

    Raises:
        FileExistsError: `output` exists and may not be overwritten.
    """
    output = Path(output)
    if output.exists() and not overwrite:
        raise FileExistsError(f"{output} exists; give --overwrite (overwrite=True) to replace it")
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


def save_folder(
    output: str | os.PathLike, model: modeling.HfViTPreTrainedModel, processor, overwrite: bool = False
) -> None:
    """Save a model and its image processor into one folder: complete, or not at all.

    Raises:
        FileExistsError: `output` exists and may not be overwritten.
        OSError: the disk is full, or nothing may be written there; `output` is as it was.
    """
    with new_folder(output, overwrite) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


def _is_about_writing(error: Exception, folder: Path) -> bool:
    """A full disk, or no rights: as an OSError of Python, or as the class of its own that safetensors has."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS) or str(folder) in str(error)
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
