"""Fingerprints of models and data, saved with cached features, results and checkpoints."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file, extract_commit_hash

from ..files.manifest import sha256_of
from ..files.versions import versions_of
from .splits import Split

_MOST_BYTES = 2**30  # largest size of images whose content is hashed, which takes some seconds
_MODEL_FILES = (
    "*.safetensors",
    "*.bin",
    "*.index.json",
    "config.json",
    "*processor_config.json",
    "adapter_config.json",
)


def fingerprint_model(name: str) -> dict[str, Any]:
    """Return the fingerprint of a model: the SHA-256 of its files, or its commit on the Hub; and versions of the code.

    Raises:
        ValueError: the model is on the Hub, and its commit is unknown.
    """
    code = versions_of(("hf_vit", "transformers"))
    folder = Path(name)
    if folder.exists():
        files = [folder] if folder.is_file() else sorted({file for glob in _MODEL_FILES for file in folder.glob(glob)})
        return {"files": {file.name: sha256_of(file) for file in files}, "code": code}
    commit = extract_commit_hash(cached_file(name, "config.json"), None)
    if commit is None:
        raise ValueError(f"cannot tell which commit of {name} is loaded; download it and pass its folder")
    return {"name": name, "commit": commit, "code": code}


def fingerprint_data(split: Split) -> dict[str, Any]:
    """Return the fingerprint of images and labels: a SHA-256 of their content, or of sizes and modification times.

    Up to 1 GiB of images are read. Larger data are identified by the fingerprint of `datasets` (which depends on the
    commit on the Hub, or on the local files) and by size and modification time of every image file. Shards are
    identified by their sizes and their modification times or etags.
    """
    meaning = {"names": split.label_names, "numbers": split.numbers, "labels": split.num_labels}
    meaning |= {"image_column": split.image_column, "label_column": split.label_column}
    if split.is_sharded:
        kind, found = "shards", [split.samples.index.files, split.samples.index.stamps]
    elif (content := _hash_content(split)) is not None:
        kind, found = "content", [content]
    else:
        kind, found = "fingerprint", [split.samples._fingerprint, _hash_times(split)]
    return {kind: _digest([meaning, *found]), "images": len(split)}


def describe_fingerprint(fingerprint: dict[str, Any]) -> str:
    """Return a short form of a fingerprint for messages."""
    words = {name: _digest(value) if isinstance(value, dict) else str(value) for name, value in fingerprint.items()}
    return ", ".join(f"{name} {word[:12]}" for name, word in words.items())


def _hash_content(split: Split) -> str | None:
    """SHA-256 of the bytes and labels of all images, in order; None for more than 1 GiB."""
    digest, size = hashlib.sha256(), 0
    columns = [column for column in (split.image_column, split.label_column) if column is not None]
    for batch in split.samples.select_columns(columns).iter(256):
        images = batch[split.image_column]
        labels = [None] * len(images) if split.label_column is None else batch[split.label_column]
        for image, label in zip(images, labels, strict=True):
            content = b""
            with suppress(OSError, TypeError, ValueError):  # unreadable, or no image
                is_file = image["bytes"] is None and Path(image["path"]).is_file()  # no device or pipe
                content = Path(image["path"]).read_bytes() if is_file else image["bytes"] or b""
            size += len(content)
            if size > _MOST_BYTES:
                return None
            digest.update(f"{len(content)} {json.dumps(label, sort_keys=True, default=str)} ".encode())
            digest.update(content)
    return digest.hexdigest()


def _hash_times(split: Split) -> str:
    """SHA-256 of size and modification time of every image file, zeros if unreadable; of nothing for tables."""
    digest = hashlib.sha256()
    for path, is_file in split.paths():
        if is_file:
            state = 0, 0
            with suppress(OSError, TypeError, ValueError):
                found = os.stat(str(path))
                state = found.st_size, found.st_mtime_ns
            digest.update(f"{state}".encode())
    return digest.hexdigest()


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
