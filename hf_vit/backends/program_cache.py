"""Cache of converted programs on disk.

An entry is a folder `hf_vit/programs/<identity>/` in the assets cache of Hugging Face (`HF_ASSETS_CACHE`, by default
`HF_HOME/assets`): the files of the program, and a `manifest.json` with their sha256. An entry is written completely or
not at all; a damaged one is made again. The most recently used entries are kept, up to 8 GiB
(`HF_VIT_PROGRAM_CACHE`, in GiB; 0 keeps none). Everything in the cache may be deleted at any time.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from huggingface_hub import constants

from ..files.output import new_folder
from ..models.utils import MANIFEST, check_files

_Loaded = TypeVar("_Loaded")


def cache_folder() -> Path:
    """Return the folder of all entries."""
    return Path(constants.HF_ASSETS_CACHE, "hf_vit", "programs")


def cached(identity: str | None, make: Callable[[Path], None], load: Callable[[Path], _Loaded]) -> _Loaded:
    """Load a program from the cache; make it first if it is missing or damaged.

    Args:
        identity: name of the entry's folder, unique for what the program computes; None: do not use the cache.
        make: function that writes the files of the program into an empty folder.
        load: function that reads them from a folder, which may be deleted afterward.
    """
    try:
        limit = float(os.environ.get("HF_VIT_PROGRAM_CACHE", "8")) * 2**30
    except ValueError as error:
        raise ValueError(f"HF_VIT_PROGRAM_CACHE must be in GiB, such as 8, or 0 for no cache: {error}") from None
    entry = cache_folder() / identity if identity is not None and limit > 0 else None
    if entry is not None:
        with suppress(Exception):  # it is missing or damaged, or another version of the runtime wrote it
            check_files(entry / MANIFEST)
            loaded = load(entry)
            os.utime(entry / MANIFEST)
            return loaded
        shutil.rmtree(entry, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        make(made)
        loaded = load(made)
        if entry is not None:
            with suppress(OSError):  # the cache is not writable, or another process was faster
                with new_folder(entry, marker=MANIFEST) as folder:
                    for file in made.iterdir():
                        shutil.move(file, folder)
                _drop_oldest(limit)
        return loaded


def _drop_oldest(limit: float) -> None:
    """Delete the least recently used entries until the others have at most `limit` bytes; the newest is kept."""
    entries = sorted(cache_folder().glob(f"*/{MANIFEST}"), key=lambda file: file.stat().st_mtime, reverse=True)
    total = 0
    for number, entry in enumerate(entries):
        total += sum(file.stat().st_size for file in entry.parent.iterdir())
        if total > limit and number:
            shutil.rmtree(entry.parent, ignore_errors=True)
