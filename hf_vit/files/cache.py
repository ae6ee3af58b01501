"""Folders of the assets cache for what can be made again, such as indexes."""

import functools
import os
import tempfile
from pathlib import Path

from huggingface_hub import cached_assets_path


def index_folder(namespace: str, name: str) -> Path:
    """Return a folder of the assets cache; if the cache cannot be written, a temporary one of this process."""
    try:
        folder = cached_assets_path("hf_vit", namespace, name)
    except OSError:
        folder = None
    if folder is None or not os.access(folder, os.W_OK):
        folder = Path(_temporary_cache().name, namespace, name)
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _temporary_cache() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="hf_vit-", ignore_cleanup_errors=True)  # deleted when the process ends
