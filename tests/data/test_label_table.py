"""Folders whose labels are in a table."""

import csv
import re

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as Pillow

from hf_vit.data.folders import load_table
from hf_vit.data.sources import load_split, names_of_splits
from hf_vit.data.splits import open_split

LABELS = {"train/a.png": ["cat", "dog"], "train/b.png": [], "val/c.png": ["dog"], "d.png": ["bird"]}


def write(folder, header, rows, name="labels.csv"):
    with open(folder / name, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return folder / name


@pytest.fixture
def images(tmp_path):
    for name in LABELS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Pillow.new("RGB", (5, 7)).save(tmp_path / name)
    return tmp_path


def contents(folder, split):
    samples = open_split(load_split(str(folder), split))
    names = samples.label_names or []
    found = {}
    for sample in samples.samples:
        labels = [names[number] for number in np.flatnonzero(samples.label(sample))]
        found[sample["image"]["path"].removeprefix(f"{folder}/")] = sorted(labels)
    return found


EXPECTED = {
    "train": {"d.png": ["bird"], "train/a.png": ["cat", "dog"], "train/b.png": []},
    "validation": {"val/c.png": ["dog"]},
}


def test_labels_in_one_column(images):
    write(images, ["image", "labels"], [[name, " ; ".join(labels)] for name, labels in LABELS.items()])
    assert names_of_splits(str(images)) == ["train", "validation"]
    assert {split: contents(images, split) for split in EXPECTED} == EXPECTED


def test_a_column_for_each_class(images):
    names = ["dog", "cat", "bird", "unseen"]
    rows = [[name, *(int(one in labels) for one in names)] for name, labels in LABELS.items()]
    write(images, ["image", *names], rows)
    assert {split: contents(images, split) for split in EXPECTED} == EXPECTED
    assert open_split(load_split(str(images), "train")).label_names == names


def test_metadata_and_a_column_of_splits(images):
    rows = [[name, ";".join(labels), "test" if name == "d.png" else "train"] for name, labels in LABELS.items()]
    write(images, ["file_name", "labels", "split"], rows, "metadata.csv")
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
    table = write(images, header, rows)
    with pytest.raises((ValueError, OSError), match=re.escape(said)):
        load_table(table)


@pytest.mark.parametrize("kind", ["names", "numbers", "classes"])
def test_lists_in_a_table_of_images(kind):
    feature = {"names": Value("string"), "numbers": Value("int64"), "classes": ClassLabel(names=["a", "b", "c"])}[kind]
    lists = [["a", "c"], [], ["b"]] if kind == "names" else [[0, 2], [], [1]]
    picture = {"bytes": b"", "path": None}
    features = Features({"image": Image(decode=False), "tags": List(feature)})
    split = open_split(Dataset.from_dict({"image": [picture] * 3, "tags": lists}, features=features))
    assert split.multi_label
    assert [split.label(sample).tolist() for sample in split.samples] == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert split.label_names == (["LABEL_0", "LABEL_1", "LABEL_2"] if kind == "numbers" else ["a", "b", "c"])
