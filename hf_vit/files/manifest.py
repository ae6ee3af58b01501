"""The manifest of a model folder, manifest.json: size and SHA-256 of its files.

`convert`, training and `push` write it; `hf_vit.load` and `hf-vit verify` check it. `from_pretrained` does not.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from .json_files import parse_json, read_text
from .model_files import find_file

MANIFEST = "manifest.json"
_FORMAT = "hf_vit manifest, version 1"  # other programs also write files named manifest.json
_SMALL = 2**20  # bytes; larger files are hashed only if they have changed
# What is read of a model. A file that matches must be listed, so that a damaged list does not switch its check off.
_READ = ("config.json", "preprocessor_config.json", "conversion.json", "adapter_config.json")
_READ += ("model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model*.bin*")

Entries = dict[str, dict[str, Any]]  # name of a file -> {"size": bytes, "sha256": hexadecimal}


def sha256_of(path: str | os.PathLike) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder, except for hidden files, and README.md, which people edit."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    names = {file.relative_to(folder).as_posix(): file for file in files}
    listed = {name: file for name, file in names.items() if "/." not in f"/{name}" and file.name != "README.md"}
    entries = {name: manifest_entry(file) for name, file in listed.items() if name != MANIFEST}
    (folder / MANIFEST).write_text(manifest_text(entries), encoding="utf-8")


def manifest_text(entries: Entries) -> str:
    """Return the text of a manifest."""
    return json.dumps({"format": _FORMAT, "files": dict(sorted(entries.items()))}, indent=2) + "\n"


def manifest_entry(content: Path | bytes) -> dict[str, Any]:
    """Return the entry of a file, given by its path or its content."""
    if isinstance(content, bytes):
        return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return {"size": content.stat().st_size, "sha256": sha256_of(content)}


def read_manifest(text: str) -> Entries | None:
    """Return the entries of a manifest; None if another program wrote the file.

    Raises:
        ValueError: the manifest is damaged.
    """
    content = parse_json(text, MANIFEST)
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        if content["format"] == _FORMAT:
            return {
                str(name): {"size": int(entry["size"]), "sha256": str(entry["sha256"])}
                for name, entry in content["files"].items()
            }
    if "hf_vit" in text or "sha256" in text:  # probably ours, so the files must not be used unchecked
        raise ValueError(f"{MANIFEST} is damaged or from a newer version of hf_vit (expected {_FORMAT!r})")
    return None


def update_manifest(folder: Path, *names: str) -> None:
    """List files of a folder again that were changed or added, if it has our manifest."""
    file = folder / MANIFEST
    listed = read_manifest(read_text(file)) if file.is_file() else None
    if listed is not None:
        listed |= {name: manifest_entry(folder / name) for name in names}
        file.write_text(manifest_text(listed), encoding="utf-8")


def check_manifest(name: str | os.PathLike, where: Mapping[str, Any]) -> None:
    """Check the local files of a folder or a Hub repository against its manifest, if it has one.

    Args:
        where: arguments of `from_pretrained` that locate files, such as `revision`.

    Raises:
        ValueError: a file does not match the manifest, or is read and not listed.
    """
    if (file := find_file(name, MANIFEST, where, needs_hub=False)) is not None:
        check_files(Path(file))


def check_files(manifest: Path, thorough: bool = False) -> list[str]:
    """Check the files next to a manifest against it; files may be missing.

    Small files are hashed at every load. Larger files are hashed at the first load, and again if their size,
    modification time or inode has changed, because hashing takes longer than loading. Their state is recorded in
    Hugging Face's assets cache.

    Args:
        manifest: path of the manifest.
        thorough: hash all files, including those that have not changed since they were last hashed.

    Returns:
        Names of the files that were checked; none if another program wrote the manifest.

    Raises:
        ValueError: a file does not match the manifest, weights or a configuration are not listed, or the manifest is
            damaged.
    """
    try:
        listed = read_manifest(read_text(manifest))
    except ValueError as error:
        raise ValueError(f"cannot check the files next to {manifest}: {error}; download them again") from None
    if listed is None:
        return []
    checked = []
    for name, expected in listed.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{manifest} lists {name!r}, which is outside its folder")
        file = manifest.parent / name
        if file.is_file():
            _check_file(file, expected["size"], expected["sha256"], thorough)
            checked.append(name)
    unlisted = find_unlisted([file.name for file in manifest.parent.iterdir()], listed)
    if unlisted:
        raise ValueError(
            f"{manifest.parent / unlisted[0]} is not listed in {MANIFEST}, which is damaged or older than the file; "
            f"download them again with force_download=True, or delete {MANIFEST} if you added the file yourself"
        )
    return checked


def _check_file(file: Path, size: int, sha256: str, thorough: bool) -> None:
    """Raise ValueError unless a file has this size and hash; a hash that was recorded for its state is not repeated."""
    from huggingface_hub import constants  # not at the top: the import is slow

    status = file.stat()
    state = f"{status.st_size} {status.st_mtime_ns} {status.st_ino} {sha256}".encode()
    path_hash = hashlib.sha256(os.fsencode(file.absolute())).hexdigest()
    record = Path(constants.HF_ASSETS_CACHE, "hf_vit", "verified", path_hash)
    is_recorded = not thorough and record.is_file() and record.read_bytes() == state
    if status.st_size != size or not (is_recorded or sha256_of(file) == sha256):
        raise ValueError(
            f"{file} has {status.st_size} bytes or a sha256 that do not match {MANIFEST}; download it again with "
            f"force_download=True, or delete {MANIFEST} if you changed the file yourself"
        )
    if status.st_size > _SMALL and not is_recorded:
        with suppress(OSError):  # without a cache, the weights are hashed at every load
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_bytes(state)


def find_unlisted(names: Iterable[str], listed: Collection[str]) -> list[str]:
    """Return the names of weights and configurations, of the files of a folder, that a manifest does not list."""
    return sorted(name for name in names if name not in listed and any(fnmatchcase(name, pattern) for pattern in _READ))
