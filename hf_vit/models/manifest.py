"""Checks of a folder before its model is loaded: its place, and the manifest that `push` adds.

A manifest has the size and the sha256 of the files.

Small files are hashed at every load. Weights are hashed at the first load, since hashing takes longer than loading, and
again when their size, date or inode has changed.
"""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import cached_assets_path
from transformers.utils import logging
from transformers.utils.hub import cached_file

logger = logging.get_logger(__name__)

MANIFEST, QUANTIZATION_RECORD = "manifest.json", "quantization.json"
_FORMAT = "hf_vit manifest, version 1"  # other programs have files of this name too
_WHERE = ("cache_dir", "local_files_only", "proxies", "revision", "subfolder", "token")
_LARGEST = 1 << 24  # bytes of a manifest: more than 100,000 files
_SMALL = 1 << 20  # bytes
_BLOCK = 1 << 20  # bytes
_HUB_NAME = re.compile(r"[\w.-]*\w/\w[\w.-]*")  # not ./name


def check_place(name: str | os.PathLike, subfolder: str | None = None) -> None:
    """Check that a name is a folder with a config.json, or can be a name on the Hub.

    Raises:
        OSError: it is a file, a folder without a model, or a path that does not exist.
    """
    path, text = Path(name, subfolder or ""), os.fspath(name)
    if path.is_file() and path.suffix != ".json":
        raise NotADirectoryError(
            f"{text} is a file (expected a folder that convert, training or save_pretrained wrote, or a name on the "
            "Hub); convert a checkpoint with `hf-vit convert FILE FOLDER`"
        )
    if path.is_dir() and not (path / "config.json").exists():
        found = "no config.json"
        if (path / "adapter_config.json").exists():
            found = "an adapter of PEFT and no model; hf_vit.load merges it with the base model that it names"
        raise FileNotFoundError(
            f"{text} holds {found} (expected a folder that convert, training or save_pretrained wrote)"
        )
    if not Path(name).exists() and not _HUB_NAME.fullmatch(text):
        raise FileNotFoundError(
            f"there is no folder {text} (expected a folder of a model, or owner/name on the Hub; `hf-vit convert` "
            f"makes a folder of a released checkpoint, `hf-vit catalog` lists them){_suggest(Path(text))}"
        )


@contextmanager
def absence_explained(name: str | os.PathLike) -> Iterator[None]:
    """Turn a failed download into one sentence: there is no such folder, and the reason given by the Hub.

    Raises:
        OSError: the name is neither a folder nor on the Hub, or the Hub cannot be reached.
    """
    try:
        yield
    except OSError as error:
        if Path(name).exists():
            raise
        text, reason = os.fspath(name), " ".join(str(error).split())
        raise OSError(f"there is no folder {text}{_suggest(Path(text))}; as a name on the Hub: {reason}") from error


def _suggest(path: Path) -> str:
    """Suggest the model folder with the most similar name, in place of a path that does not exist."""
    try:
        models = [config.parent.name for config in path.parent.glob("*/config.json")]
    except OSError:  # may not be read
        models = []
    alike = difflib.get_close_matches(path.name, models, n=1)
    return f"; did you mean {path.parent / alike[0]}?" if alike else ""


def manifest_text(files: dict[str, dict[str, Any]]) -> str:
    """Return the text of a manifest.

    Args:
        files: name -> {"size": bytes, "sha256": hexadecimal}.
    """
    return json.dumps({"format": _FORMAT, "files": dict(sorted(files.items()))}, indent=2) + "\n"


def read_manifest(text: str) -> dict[str, dict[str, Any]] | None:
    """Read the files that a manifest lists, as in `manifest_text`; None if the text is another kind of file."""
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            return None
        return {
            str(name): {"size": int(of["size"]), "sha256": str(of["sha256"])} for name, of in content["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def check_pushed(
    name: str | os.PathLike, settings: dict[str, Any], where: dict[str, Any], thorough: bool = False
) -> None:
    """Check the local files of a folder or repository against its manifest, if it has one.

    Args:
        settings: the content of config.json, with the commit it was found in.
        where: arguments of `from_pretrained` that locate files, such as `revision`.
        thorough: as in `check_files`.

    Raises:
        ValueError: a file is not the one that was pushed.
    """
    if (file := _find_beside(name, MANIFEST, settings, where)) is not None:
        check_files(Path(file), thorough)


def _find_beside(name: str | os.PathLike, file: str, settings: dict[str, Any], where: dict[str, Any]) -> str | None:
    """Return the path of a file beside config.json; None if there is none or the Hub cannot be reached.

    Args:
        name: a folder, or a name on the Hub.
        settings, where: as in `check_pushed`.
    """
    try:
        return cached_file(
            os.fspath(name),
            file,
            _commit_hash=settings.get("_commit_hash"),
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **{option: where[option] for option in _WHERE if option in where},
        )
    except OSError:
        return None


def warn_of_int8(name: str | os.PathLike, settings: dict[str, Any], where: dict[str, Any]) -> None:
    """Warn of an int8 program in a folder, which `from_pretrained` does not use; arguments as in `check_pushed`."""
    if _find_beside(name, QUANTIZATION_RECORD, settings, where) is not None:
        logger.warning(
            f"{name} holds an int8 program, which from_pretrained does not use: the model computes in float32. "
            f"hf_vit.load({str(name)!r}) uses it; a pipeline takes the model and the processor that it returns."
        )


def drop_manifest(folder: str | os.PathLike) -> None:
    """Delete the manifest of a folder whose files are about to change."""
    file = Path(folder) / MANIFEST
    if file.is_file() and read_manifest(file.read_text(encoding="utf-8", errors="replace")) is not None:
        file.unlink()


def check_files(manifest: Path, thorough: bool = False) -> list[str]:
    """Check the files beside a manifest against it; missing files are allowed.

    Args:
        thorough: hash all weights, also those that have not changed since they were last hashed.

    Returns:
        Names of the files that were checked.

    Raises:
        ValueError: a file is not the one that was pushed, or the manifest is too large.
    """
    if (size := manifest.stat().st_size) > _LARGEST:
        raise ValueError(f"{manifest} has {size} bytes; at most {_LARGEST} are read")
    listed = read_manifest(manifest.read_text(encoding="utf-8", errors="replace"))
    if listed is None:
        return []
    memory = _Memory(manifest)
    checked = []
    for name, expected in listed.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{manifest} lists {name!r}, which is outside its folder")
        file = manifest.parent / name
        if not file.is_file():
            continue
        checked.append(name)
        size = file.stat().st_size
        if size != expected["size"]:
            raise ValueError(_sentence(file, f"{size} bytes, expected {expected['size']}"))
        if not thorough and size > _SMALL and memory.knows(name, file, expected["sha256"]):
            continue
        if (found := _sha256_of(file)) != expected["sha256"]:
            raise ValueError(_sentence(file, f"sha256 {found[:16]}..., expected {expected['sha256'][:16]}..."))
        if size > _SMALL:
            memory.keep(name, file, found)
    return checked


def _sentence(file: Path, difference: str) -> str:
    return (
        f"{file} is not the file that was pushed ({difference}); download it again with force_download=True, "
        f"or delete {MANIFEST} beside it if you changed it yourself"
    )


def _sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class _Memory:
    """Record of hashed weights (size, date, inode, sha256), in the assets cache of Hugging Face."""

    def __init__(self, manifest: Path):
        self._file: Path | None = None
        self._known: dict[str, Any] = {}
        with suppress(OSError, ValueError, TypeError):
            folder = cached_assets_path("hf_vit", "verified")
            self._file = folder / f"{hashlib.sha256(os.fsencode(manifest.absolute())).hexdigest()[:32]}.json"
            self._known = dict(json.loads(self._file.read_text(encoding="utf-8")))

    def knows(self, name: str, file: Path, sha256: str) -> bool:
        """Tell whether the file had this hash and has not changed since."""
        return self._known.get(name) == [*_state_of(file), sha256]

    def keep(self, name: str, file: Path, sha256: str) -> None:
        """Record a file; if the cache cannot be written, it is hashed again the next time."""
        self._known[name] = [*_state_of(file), sha256]
        if self._file is not None:
            draft = self._file.with_suffix(f".{os.getpid()}")
            with suppress(OSError):
                draft.write_text(json.dumps(self._known), encoding="utf-8")
                os.replace(draft, self._file)


def _state_of(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino
