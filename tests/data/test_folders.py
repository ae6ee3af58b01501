"""Folders of images, as `datasets` reads them, from an index that is made once."""

import os
import shutil
from pathlib import Path

import datasets
import pytest

from hf_vit.data import folders
from hf_vit.data.folders import load_folder
from hf_vit.data.sources import load_split

from .test_loaders import picture

LAYOUTS = {
    "splits": ("train/b/2.png", "train/b/10.JPEG", "train/b c/1.png", "train/a/1.png", "test/a/x.png", "test/b/y.png"),
    "classes": ("owl/1.png", "owl/2.png", "cat/3.png", "cat/notes.txt", "cat/.hidden.png", "__pycache__/4.png"),
}


def make(root: Path, names: tuple[str, ...]) -> Path:
    for number, name in enumerate(names):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("txt"):
            file.write_text("nothing")
        else:
            picture(number).save(file)
    return root


def rows_of(dataset: datasets.Dataset) -> list:
    return dataset.cast_column("image", datasets.Image(decode=False)).to_list()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_splits_are_those_of_datasets(layout, tmp_path):
    """`datasets`' imagefolder judges: features, rows and their order."""
    root = make(tmp_path / "images", LAYOUTS[layout])
    theirs = datasets.load_dataset("imagefolder", data_dir=str(root), cache_dir=str(tmp_path / "cache"))
    for split, expected in theirs.items():
        ours = load_split(str(root), str(split))
        assert ours.features == expected.features
        assert rows_of(ours) == rows_of(expected)


def splits_of(root: Path) -> dict[str, datasets.Dataset]:
    return load_folder(root, str(root)).splits


def test_an_index_is_made_once_and_again_when_a_file_is_added(tmp_path, monkeypatch):
    root = make(tmp_path / "images", LAYOUTS["splits"])
    before = splits_of(root)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "list_directory", None)  # of files
        again = splits_of(root)
    for split, data in again.items():
        assert data._fingerprint == before[split]._fingerprint
    before["train"].map(lambda row: {"label": 0})  # `datasets` keeps the result next to its source
    assert splits_of(root).keys() == {"train", "test"}
    shutil.copy(root / "train/a/1.png", root / "train/a/9.png")
    assert len(splits_of(root)["train"]) == 5
    os.remove(root / "train/a/9.png")
    assert splits_of(root)["train"]._fingerprint == before["train"]._fingerprint


def test_links_to_a_folder_above_are_not_followed(tmp_path):
    root = make(tmp_path / "images", LAYOUTS["classes"])
    (root / "cat" / "again").symlink_to(root, target_is_directory=True)
    assert len(splits_of(root)["train"]) == 3
