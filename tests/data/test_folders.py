"""Folders of images, as `datasets` reads them, from an index that is made once; and labels in a table."""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import ClassLabel, List, Value

from hf_vit.data import folders
from hf_vit.data.folders import load_folder, load_table
from hf_vit.data.sources import load_split, names_of_splits
from hf_vit.data.splits import open_split

from ..photographs import table_of
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
    for split, data in again.items():
        assert data._fingerprint == before[split]._fingerprint
    before["train"].map(lambda row: {"label": 0})  # `datasets` keeps the result next to its source
    assert load_folder(root).keys() == {"train", "test"}
    shutil.copy(root / "train/a/1.png", root / "train/a/9.png")
    assert len(load_folder(root)["train"]) == 5
    os.remove(root / "train/a/9.png")
    assert load_folder(root)["train"]._fingerprint == before["train"]._fingerprint


# Labels in a table

LABELS = {"train/a.png": ["cat", "dog"], "train/b.png": [], "val/c.png": ["dog"], "d.png": ["bird"]}


def write_table(folder, header, rows, name="labels.csv"):
    with open(folder / name, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return folder / name


@pytest.fixture
def images(tmp_path):
    for name in LABELS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        picture(0).save(tmp_path / name)
    return tmp_path


def contents(folder, split):
    samples = open_split(load_split(str(folder), split))
    names = samples.label_names or []
    found = {}
    for sample in samples.samples:
        labels = [names[number] for number in np.flatnonzero(samples.label(sample))]
        found[sample["image"]["path"].removeprefix(f"{folder}/")] = sorted(labels)
    return found


@pytest.mark.parametrize("names", [None, ["dog", "cat", "bird", "unseen"]])
def test_labels_in_one_column_or_a_column_for_each_class(images, names):
    if names:
        rows = [[name, *(int(one in labels) for one in names)] for name, labels in LABELS.items()]
        write_table(images, ["image", *names], rows)
        assert open_split(load_split(str(images), "train")).label_names == names
    else:
        write_table(images, ["image", "labels"], [[name, " ; ".join(labels)] for name, labels in LABELS.items()])
    assert names_of_splits(str(images)) == ["train", "validation"]
    assert contents(images, "train") == {"d.png": ["bird"], "train/a.png": ["cat", "dog"], "train/b.png": []}
    assert contents(images, "validation") == {"val/c.png": ["dog"]}


def test_metadata_and_a_column_of_splits(images):
    rows = [[name, ";".join(labels), "test" if name == "d.png" else "train"] for name, labels in LABELS.items()]
    write_table(images, ["file_name", "labels", "split"], rows, "metadata.csv")
    assert contents(images, "test") == {"d.png": ["bird"]}
    assert len(contents(images, "train")) == 3


@pytest.mark.parametrize(
    ("header", "rows", "said"),
    [
        (["file", "labels"], [["d.png", "bird"]], "file"),
        (["image", "label"], [["d.png", "bird"]], "image, label"),
        (["image", "labels", "cat"], [["d.png", "bird", "1"]], "cat"),
        (["image"], [["d.png"]], "image"),
        (["image", "labels"], [["d.png", "bird"], ["./d.png", "cat"]], "line 3"),
        (["image", "labels"], [["d.png"]], "line 2"),
        (["image", "labels"], [["d.png", "bird", "cat"]], "line 2"),
        (["image", "labels"], [["e.png", "bird"]], "e.png"),
        (["image", "labels"], [["../d.png", "bird"]], "../d.png"),
        (["image", "labels"], [["/dev/zero", "bird"]], "/dev/zero"),
        (["image", "labels"], [["d.png", ""]], "labels"),
        (["image", "cat"], [["d.png", "yes"]], "yes"),
        (["image", "labels"], [], "labels"),
        (["image", "labels"], [["train/a.png", "bird"]], "b.png"),
    ],
)
def test_other_tables_are_refused(images, header, rows, said):
    table = write_table(images, header, rows)
    with pytest.raises((ValueError, OSError), match=re.escape(said)):
        load_table(table)


@pytest.mark.parametrize("kind", ["names", "numbers", "classes"])
def test_lists_in_a_table_of_images(kind):
    feature = {"names": Value("string"), "numbers": Value("int64"), "classes": ClassLabel(names=["a", "b", "c"])}[kind]
    lists = [["a", "c"], [], ["b"]] if kind == "names" else [[0, 2], [], [1]]
    split = open_split(table_of([{"bytes": b"", "path": None}] * 3, lists, List(feature)))
    assert split.multi_label
    assert [split.label(sample).tolist() for sample in split.samples] == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert split.label_names == (["LABEL_0", "LABEL_1", "LABEL_2"] if kind == "numbers" else ["a", "b", "c"])
