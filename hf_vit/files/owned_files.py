"""Ownership of folders: a marker lists what was written into a folder; nothing else in it is replaced or deleted.

The marker is `.hf_vit`, or in a folder of a model its `manifest.json`, both as in `models.utils.manifest_text`.
"""

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from ..models.utils import MANIFEST, manifest_entry, manifest_text, read_manifest, read_text
from .messages import join_names
from .readme import is_own_readme

MARK = ".hf_vit"
LOCK = ".lock"  # an empty file that a training run locks
_HASHED = 2**20  # bytes; larger files are hashed only if they are newer than the marker
# Of a training run, for its card.
REPORTS = ("metrics.json", "card_data.json", "learning_curve.png", "confusion_matrix.png", "recipe.yaml")
REPORTS += ("calibration.json",)
# The only files of a folder that are pushed to the Hub, besides code that its `auto_map` names.
PUSHED = (
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"),
    *("config.json", "preprocessor_config.json", "conversion.json"),
    *("program.xml", "program.bin", "quantization.json"),
    *("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"),  # of sentence-transformers
    *REPORTS,
    *("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "*.onnx", "*.onnx.data"),
)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name, or a path with slashes, matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def write_marker(folder: Path, marker: str = MARK) -> None:
    """Write the marker of a folder: its files, with size and hash. A manifest omits README.md, which people edit."""
    unlisted = (LOCK, MARK, MANIFEST, *(["README.md"] if marker == MANIFEST else []))
    names = [name for name in sorted(_names(folder)) if name not in unlisted]
    names = [name for name in names if not (folder / name).is_symlink()]
    (folder / marker).write_text(manifest_text({name: manifest_entry(folder / name) for name in names}), "utf-8")


def check_overwritable(folder: str | os.PathLike, known: tuple[str, ...] = (), linked: str = "") -> None:
    """Refuse a folder that holds anything that this package did not write; an empty folder is accepted.

    Args:
        known: patterns of further names, which a program writes over time into a folder that it has marked.
        linked: name of a folder in it that may be a symbolic link to one elsewhere.

    Raises:
        FileExistsError: it is not a folder, or holds a foreign or changed file; nothing was changed.
    """
    folder = Path(folder)
    if folder.is_symlink() or not folder.is_dir():
        kind = "a symbolic link" if folder.is_symlink() else "a file"
        raise FileExistsError(f"cannot replace {folder}: it is {kind} (expected a folder); nothing was changed")
    names = {name for name in _names(folder) if name != linked}
    if (folder / linked).is_symlink() and (folder / linked).is_dir():
        names |= {f"{linked}/{name}" for name in _names(folder / linked)}
    ours = _unchanged(folder / MARK) | _unchanged(folder / MANIFEST) | {LOCK}
    ours |= {name for name in names if MARK in ours and matches(name, known)}
    if foreign := sorted(name for name in names - ours if not is_own_readme(folder / name)):
        raise FileExistsError(
            f"cannot replace {folder}: it has files that hf_vit did not write, or that were changed since: "
            f"{join_names(foreign)}. Nothing was changed; move them away, delete the folder, or choose another one"
        )


def check_no_model(folder: str | os.PathLike) -> None:
    """Refuse a folder that holds weights, for an output without weights.

    Raises:
        FileExistsError: it holds weights; nothing was changed.
    """
    if weights := sorted(Path(folder).rglob("*.safetensors")):
        raise FileExistsError(
            f"cannot replace {folder}: it holds a model ({weights[0].relative_to(folder)}); nothing was changed. "
            "Choose another folder"
        )


def _names(folder: Path) -> Iterator[str]:
    """Yield all entries below a folder except folders, as paths with slashes; links to folders are not followed."""
    for parent, folders, files in os.walk(folder):
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(parent, name)))):
            yield Path(parent, name).relative_to(folder).as_posix()


def _unchanged(marker: Path) -> set[str]:
    """Return the name of a marker, and of the files that it lists and that are still as they were written."""
    try:
        listed = None if marker.is_symlink() or not marker.is_file() else read_manifest(read_text(marker))
    except ValueError:
        listed = None
    if listed is None:
        return set()
    found, written = {marker.name}, marker.stat().st_mtime_ns
    for name, entry in listed.items():
        file = marker.parent / name
        if file.is_symlink() or not file.is_file() or (status := file.stat()).st_size != entry["size"]:
            continue
        if (status.st_size > _HASHED and status.st_mtime_ns <= written) or manifest_entry(file) == entry:
            found.add(name)
    return found
