"""A static Space on the Hub: the page of `hf-vit export --to web`, which needs no backend."""

import os
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, SpaceCardData

from ..files.output import MARK, write_text

_README = """\
---
{metadata}
---

# {title}

This page classifies pictures in the visitor's browser; no picture is uploaded. It was written by
`hf-vit demo --static`, and uses [ONNX Runtime](https://github.com/microsoft/onnxruntime), MIT license.

To open it locally, run `hf-vit demo FOLDER`, or `python -m http.server` in this folder. To publish it as your own
Space, run:

```bash
hf upload OWNER/NAME . --repo-type space
```
"""


def write_space_readme(folder: str | os.PathLike, title: str, models: Sequence[str] = ()) -> None:
    """Write the README.md that makes a page a static Space.

    Args:
        folder: folder of the page.
        title: name of the model.
        models: names of models on the Hub; the Hub links the Space from their pages.
    """
    metadata = SpaceCardData(
        title=title, sdk="static", app_file="index.html", pinned=False, models=list(models) or None
    )
    write_text(Path(folder, "README.md"), _README.format(metadata=metadata, title=title))


def full_space_name(space: str) -> str:
    """Return owner/name; a name without an owner belongs to the user."""
    return space if "/" in space else f"{HfApi().whoami(cache=True)['name']}/{space}"


def push_static_space(folder: Path, space: str, private: bool | None = None) -> str:
    """Upload a page and its README.md in one commit, and return the Space's URL.

    Args:
        folder: the page.
        space: owner/name; created if it does not exist.
        private: visibility of a new Space.
    """
    api = HfApi(library_name="hf_vit")
    url = api.create_repo(space, repo_type="space", space_sdk="static", private=private, exist_ok=True)
    api.upload_folder(
        repo_id=space,
        repo_type="space",
        folder_path=Path(folder),
        commit_message="Upload with hf_vit",
        ignore_patterns=[MARK],
        delete_patterns=["onnx/*", "runtime/*", "examples/*", "model?/*"],  # of an earlier push
    )
    return str(url)
