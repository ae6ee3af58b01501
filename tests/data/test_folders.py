"""Folders of images: the same data set as `datasets` makes of them, from an index that is made once."""

import json
import os
import shutil
from pathlib import Path

import datasets
import pytest

from hf_vit.data import folders
from hf_vit.data.folders import load_folder
from hf_vit.data.sources import load_split

from .test_loaders import picture

SPLITS = {
    "splits": (
        "train/b/2.png",
        "train/b/10.JPEG",
        "train/b c/1.png",
        "train/a/1.png",
        "test2017/a/x.png",
        "test2017/b/y.png",
    ),
    "classes": ("owl/1.png", "owl/2.png", "cat/3.png", "cat/notes.txt", "cat/.hidden.png", "__pycache__/4.png"),
}
LEFT_TO_DATASETS = {
    "metadata": ("train/1.png", "train/2.png", "train/metadata.jsonl"),
    "deeper": ("train/more/a/1.png", "train/more/b/2.png"),
    "no classes": ("1.png", "2.png"),
    "one class": ("train/a/1.png",),
    "splits in file names": ("a/train-1.png", "b/train-2.png", "a/test-3.png", "b/test-4.png"),
    "a class called test tube": ("train/test tube/1.png", "train/vase/1.png"),
}  # fmt: skip


def make(root: Path, names: tuple[str, ...]) -> Path:
    for number, name in enumerate(names):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("jsonl"):
            file.write_text("".join(json.dumps({"file_name": f"{n}.png", "label": n}) + "\n" for n in (1, 2)))
        elif name.endswith("txt"):
            file.write_text("nothing")
        else:
            picture(number).save(file)
    return root


def rows_of(dataset: datasets.Dataset) -> list:
    return dataset.cast_column("image", datasets.Image(decode=False)).to_list()


@pytest.mark.parametrize("layout", [*SPLITS, *LEFT_TO_DATASETS])
def test_the_splits_are_those_of_datasets(layout, tmp_path):
    """`datasets`' imagefolder judges: features, rows and their order."""
    root = make(tmp_path / "images", (SPLITS | LEFT_TO_DATASETS)[layout])
    theirs = datasets.load_dataset("imagefolder", data_dir=str(root), cache_dir=str(tmp_path / "cache"))
    assert (load_folder(root) is None) == (layout in LEFT_TO_DATASETS)
    for split, expected in theirs.items():
        ours = load_split(str(root), str(split))
        assert ours.features == expected.features
        assert rows_of(ours) == rows_of(expected)


def test_an_index_is_made_once_and_again_when_a_file_is_added(tmp_path, monkeypatch):
    root = make(tmp_path / "images", SPLITS["splits"])
    before = load_folder(root)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "list_directory", None)  # of files
        again = load_folder(root)
    assert {split: data._fingerprint for split, data in again.items()} == {
        split: data._fingerprint for split, data in before.items()
    }
    before["train"].map(lambda row: {"label": 0})  # `datasets` keeps the result next to its source
    assert load_folder(root).keys() == {"train", "test"}
    shutil.copy(root / "train/a/1.png", root / "train/a/9.png")
    assert len(load_folder(root)["train"]) == 5
    os.remove(root / "train/a/9.png")
    assert load_folder(root)["train"]._fingerprint == before["train"]._fingerprint
