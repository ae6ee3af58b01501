"""Fingerprints of models and data, saved with cached features, results and checkpoints."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from transformers.utils.hub import cached_file, extract_commit_hash

from ..files.manifest import sha256_of
from ..files.versions import versions_of
from .splits import Split

_MOST_BYTES = 2**30  # of images whose content is hashed, which takes some seconds
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
    """Return the fingerprint of images and labels: a SHA-256 of their content, which does not depend on their path.

    Of more than 1 GiB of images, it has the size of each, and the content of every n-th. Shards are identified by their
    names, sizes, and modification times or etags.
    """
    meaning = {"names": split.label_names, "numbers": split.numbers, "labels": split.num_labels}
    meaning |= {"image_column": split.image_column, "label_column": split.label_column}
    if split.targets:
        meaning["targets"] = split.target_values().tolist()
    if split.is_sharded:
        names = [os.path.basename(file) for file in split.samples.index.files]
        return {"shards": _digest([meaning, names, split.samples.index.stamps]), "images": len(split)}
    sizes = _image_sizes(split)
    stride = max(-(-sum(sizes) // _MOST_BYTES), 1)
    found = [_hash_content(split, stride), *([_digest(sizes)] if stride > 1 else [])]
    return {"content": _digest([meaning, *found]), "images": len(split)}


def describe_fingerprint(fingerprint: dict[str, Any]) -> str:
    """Return a short form of a fingerprint for messages."""
    words = {name: _digest(value) if isinstance(value, dict) else str(value) for name, value in fingerprint.items()}
    return ", ".join(f"{name} {word[:12]}" for name, word in words.items())


def _image_sizes(split: Split) -> list[int]:
    """Return the size of each image in bytes; 0 for an unreadable one."""
    sizes = []
    for batch in split.samples.select_columns(split.image_column).with_format("arrow").iter(1000):
        images = batch[split.image_column].combine_chunks()
        embedded = pc.binary_length(images.field("bytes")).to_pylist()  # pyright: ignore[reportAttributeAccessIssue]
        for length, path in zip(embedded, images.field("path").to_pylist(), strict=True):
            size = length or 0
            if length is None:
                with suppress(OSError, TypeError, ValueError):
                    size = os.stat(path).st_size
            sizes.append(size)
    return sizes


def _hash_content(split: Split, stride: int) -> str:
    """Return the SHA-256 of the labels of all images, in order, and of the bytes of every `stride`-th image."""
    digest = hashlib.sha256()
    columns = [column for column in (split.image_column, split.label_column) if column is not None]
    row = 0
    for batch in split.samples.select_columns(columns).iter(256):
        images = batch[split.image_column]
        labels = [None] * len(images) if split.label_column is None else batch[split.label_column]
        for image, label in zip(images, labels, strict=True):
            content = _content(image) if row % stride == 0 else b""
            digest.update(f"{len(content)} {json.dumps(label, sort_keys=True, default=str)} ".encode())
            digest.update(content)
            row += 1
    return digest.hexdigest()


def _content(image: dict[str, Any]) -> bytes:
    """Return the bytes of an undecoded image; none of an unreadable one."""
    with suppress(OSError, TypeError, ValueError):
        is_file = image["bytes"] is None and Path(image["path"]).is_file()  # no device or pipe
        return Path(image["path"]).read_bytes() if is_file else image["bytes"] or b""
    return b""


def image_digests(split: Split) -> list[bytes]:
    """Return the SHA-256 of the bytes of each image."""
    images = split.samples.select_columns(split.image_column)
    return [hashlib.sha256(_content(row[split.image_column])).digest() for row in images]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
