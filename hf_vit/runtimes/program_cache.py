"""The cache of programs on disk: those of backends, and those of `hf-vit compile`, which need no torch.

An entry is a folder `hf_vit/programs/<entry>/` in the assets cache of Hugging Face (`HF_ASSETS_CACHE`, by default
`HF_HOME/assets`). An entry is written completely or not at all. The most recently used entries are kept, up to 8 GiB
(`HF_VIT_PROGRAM_CACHE`, in GiB; 0 keeps none). Everything in the cache may be deleted at any time.

A program of a backend is found by all that it depends on, its weights among them; a `manifest.json` has the SHA-256 of
its files, and a damaged entry is made again. A program of `hf-vit compile` is a deployment folder, found by the name of
its model alone, so that nothing is loaded; `compiled.json` has the size and the time of the files of that model.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import constants

from ..files.json_files import read_json_object
from ..files.manifest import MANIFEST, check_files, write_manifest
from ..files.model_files import HUB_NAME
from ..files.output import new_folder, own_file, write_json
from ..files.versions import versions_of

_Loaded = TypeVar("_Loaded")
_COMPILED = "compiled.json"
_MODEL_FILE = re.compile(r".+\.(json|safetensors|bin|xml|npz|pth|pt)")


def cache_folder() -> Path:
    """Return the folder of all entries."""
    return Path(constants.HF_ASSETS_CACHE, "hf_vit", "programs")


def _limit() -> float:
    """Return the largest size of all entries, in bytes."""
    return float(os.environ.get("HF_VIT_PROGRAM_CACHE", "8")) * 2**30


def cached(entry_name: str | None, make: Callable[[Path], None], load: Callable[[Path], _Loaded]) -> _Loaded:
    """Load a program from the cache; make it first if it is missing or damaged.

    Args:
        entry_name: name of the entry's folder, unique for what the program computes; None: do not use the cache.
        make: function that writes the files of the program into an empty folder.
        load: function that reads them from a folder, which may be deleted afterward.
    """
    entry = cache_folder() / entry_name if entry_name is not None and _limit() > 0 else None
    if entry is not None:
        with suppress(Exception):  # it is missing or damaged, or another version of the runtime wrote it
            check_files(entry / MANIFEST)
            loaded = load(entry)
            os.utime(entry)
            return loaded
        shutil.rmtree(entry, ignore_errors=True)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        make(made)
        loaded = load(made)
        if entry is not None:
            with suppress(OSError):  # the cache is not writable, or another process was faster
                with new_folder(entry) as folder:
                    shutil.copytree(made, folder, dirs_exist_ok=True)
                    write_manifest(folder)
                _drop_oldest()
        return loaded


def _drop_oldest() -> None:
    """Delete the least recently used entries until the others have at most `_limit` bytes; the newest is kept."""
    entries = [path for path in cache_folder().iterdir() if path.is_dir() and not path.name.startswith(".")]
    total = 0
    for number, entry in enumerate(sorted(entries, key=lambda path: path.stat().st_mtime, reverse=True)):
        total += sum(file.stat().st_size for file in entry.rglob("*"))
        if total > _limit() and number:
            shutil.rmtree(entry, ignore_errors=True)


def add_compiled(name: str, about: dict[str, str], export: Callable[[Path], Any]) -> Path:
    """Make the program of a model, by its name as the user gives it; return its folder.

    Args:
        name: a folder, a file or another name of a model.
        about: "model" and "sha256", which `hf-vit embed` writes into its output.
        export: function that writes a deployment folder, and replaces an older one.

    Raises:
        OSError: the cache cannot be written.
    """
    folder = _compiled_folder(name)
    record = {"name": name, "files": _files_of(name), "about": about, **versions_of(["hf_vit"])}  # before it is read
    export(folder)
    with own_file(folder / _COMPILED) as draft:
        write_json(draft, record)
    _drop_oldest()
    return folder


def find_compiled(name: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder and the record of a model's program; None without one.

    Raises:
        ValueError: the model, or hf_vit, has changed since its program was made.
    """
    folder = _compiled_folder(name)
    if not (folder / _COMPILED).is_file():
        return None
    record = read_json_object(folder / _COMPILED)
    now = {"files": _files_of(name), **versions_of(["hf_vit"])}
    for what, state in now.items():
        if record[what] != state:
            changed = name if what == "files" else what
            raise ValueError(f"{changed} has changed since hf-vit compile {name}; run it again to use its program")
    with suppress(OSError):  # the cache is not writable
        os.utime(folder)
    return folder, record


def _compiled_folder(name: str) -> Path:
    path = Path(name).expanduser()
    key = str(path.resolve()) if path.exists() else name
    return cache_folder() / f"compiled-{hashlib.sha256(key.encode()).hexdigest()}"


def _files_of(name: str) -> dict[str, list[int]]:
    """Return size and time, in nanoseconds, of the files of a local model, and of the revision of one on the Hub."""
    path = Path(name).expanduser()
    files = [path]
    if path.is_dir():
        files = [file for file in path.iterdir() if _MODEL_FILE.fullmatch(file.name)]
    elif HUB_NAME.fullmatch(name) and not path.exists():
        files = [Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "refs", "main")]
    states = {file.name: file.stat() for file in sorted(files) if file.exists()}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}
