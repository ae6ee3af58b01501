"""Tables with the labels of a folder's images."""

import csv
import re

import numpy as np
import pytest
from datasets import ClassLabel, List, Value

from hf_vit.data.sources import load_split, names_of_splits
from hf_vit.data.splits import open_split

from ..photographs import table_of
from .test_loaders import picture

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


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        (["file_name", "label"], [["d.png", "cat"], ["./d.png", "dog"]]),
        (["file_name", "label"], [["../d.png", "cat"]]),
        (["file_name", "label"], [["d.png", "cat", "dog"]]),
        (["name", "label"], [["d.png", "cat"]]),
    ],
)
def test_other_metadata_are_refused(images, header, rows):
    write_table(images, header, rows, "metadata.csv")
    with pytest.raises(ValueError, match="row"):
        names_of_splits(str(images))


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[1]", "7"])
def test_a_damaged_table_is_named(images, text):
    (images / "metadata.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"metadata\.jsonl"):
        names_of_splits(str(images))


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
    write_table(images, header, rows)
    with pytest.raises(ValueError, match=re.escape(said)):
        names_of_splits(str(images))


@pytest.mark.parametrize("kind", ["names", "numbers", "classes"])
def test_lists_in_a_table_of_images(kind):
    feature = {"names": Value("string"), "numbers": Value("int64"), "classes": ClassLabel(names=["a", "b", "c"])}[kind]
    lists = [["a", "c"], [], ["b"]] if kind == "names" else [[0, 2], [], [1]]
    split = open_split(table_of([{"bytes": b"", "path": None}] * 3, lists, List(feature)))
    assert split.multi_label
    assert [split.label(sample).tolist() for sample in split.samples] == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert split.label_names == (["LABEL_0", "LABEL_1", "LABEL_2"] if kind == "numbers" else ["a", "b", "c"])
