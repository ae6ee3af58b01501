"""The manifest of a model folder, manifest.json: size and SHA-256 of its files."""

from pathlib import Path

from ..models.utils import MANIFEST, manifest_entry, manifest_text


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder, except for hidden files, and README.md, which people edit."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    names = {file.relative_to(folder).as_posix(): file for file in files}
    listed = {name: file for name, file in names.items() if not name.startswith(".") and name != "README.md"}
    entries = {name: manifest_entry(file) for name, file in listed.items() if name != MANIFEST}
    (folder / MANIFEST).write_text(manifest_text(entries), encoding="utf-8")
