"""The output folder of a run: one run at a time writes to it, and its recipe says how."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator

from ..files.contents import LOCK, refuse_foreign
from ..files.output import write_text
from .recipes import SettingsError, dump
from .settings import TrainingSettings

try:
    import fcntl
except ImportError:  # Windows: two runs in one folder are not noticed
    fcntl = None


def output_of(settings: TrainingSettings) -> Path:
    """Output folder of a run."""
    return Path(str(settings.output_dir))


def checkpoints_of(settings: TrainingSettings) -> Path:
    """Folder of a run's checkpoints."""
    return output_of(settings) / "checkpoints"


def write_recipe(settings: TrainingSettings) -> None:
    """Write the settings of a run to its folder, as recipe.yaml."""
    write_text(output_of(settings) / "recipe.yaml", dump(settings))


@contextmanager
def claimed_output(settings: TrainingSettings, accelerator: Accelerator) -> Iterator[None]:
    """Create the output folder of a run, and keep other runs out of it.

    Raises:
        SettingsError: another process trains into it; or it is not empty, and neither `resume` nor `overwrite` is set.
        FileExistsError: `overwrite` is set, but the folder has files that no run wrote.
    """
    output = output_of(settings)
    lock = _claim(output, settings) if accelerator.is_main_process else None
    try:
        accelerator.wait_for_everyone()
        yield
    finally:
        if lock is not None:
            _release(output, lock)


def _claim(output: Path, settings: TrainingSettings) -> int | None:
    """Lock the folder and empty it if `overwrite` is set; return the file descriptor of the lock."""
    if output.is_file():
        raise SettingsError(f"--output-dir is {output}, a file (expected a folder)")
    output.mkdir(parents=True, exist_ok=True)
    lock = _lock(output)
    try:
        found = [] if settings.resume else [entry for entry in output.iterdir() if entry.name != LOCK]
        if found and not settings.overwrite:
            raise SettingsError(f"{output} is not empty: continue it with --resume, or delete it with --overwrite")
        if found:
            refuse_foreign(output)
        for entry in found:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    except BaseException:
        if lock is not None:
            _release(output, lock)
        raise
    return lock


def _lock(output: Path) -> int | None:
    """Lock the folder until this process ends; None where the system or the disk has no locks.

    The lock is one of `lockf`, which data workers do not inherit: the run can be resumed as soon as it has died.
    """
    if fcntl is None:
        return None
    descriptor = os.open(output / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        raise SettingsError(
            f"another process trains into {output}: wait until it ends, or choose another --output-dir"
        ) from None
    except OSError:
        os.close(descriptor)
        (output / LOCK).unlink(missing_ok=True)
        return None
    return descriptor


def _release(output: Path, lock: int) -> None:
    (output / LOCK).unlink(missing_ok=True)
    os.close(lock)
