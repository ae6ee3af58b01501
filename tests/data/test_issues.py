"""Tables of issues: the images to leave out, and the labels to set."""

import numpy as np
import pytest

from hf_vit.data.issues import Issue, read_issues, write_issues
from hf_vit.data.splits import open_named, open_splits
from hf_vit.settings.fields import FinetuneSettings

from ..photographs import table_of
from .test_splits import write_images

COUNTS = {"ants": 12, "bees": 11, "wasps": 4}


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "data" / "train", COUNTS)
    write_images(tmp_path / "data" / "test", {"ants": 3, "bees": 2})
    return tmp_path / "data"


@pytest.fixture
def table(tmp_path):

    def write(*lines, header="image,issue,score,label,suggested,other"):
        (tmp_path / "issues.csv").write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
        return str(tmp_path / "issues.csv")

    return write


def settings(dataset, **changes):
    return FinetuneSettings(dataset=str(dataset), model="model", **changes)


def labels_by_file(split):
    return {sample["image"]["path"].rsplit("/data/", 1)[-1]: split.label(sample) for sample in split.samples}


def test_images_are_left_out_of_both_splits(folder, table):
    issues = table("train/ants/3.png,dark,0.9,ants,,", "test/bees/1.png,leak,1,bees,,train/bees/1.png")
    train, test = open_splits(settings(folder, exclude=issues))
    everything = labels_by_file(open_named(settings(folder), "train"))
    assert everything.keys() - labels_by_file(train).keys() == {"train/ants/3.png"}
    assert set(labels_by_file(test)) == {"test/ants/0.png", "test/ants/1.png", "test/ants/2.png", "test/bees/0.png"}


def test_labels_are_set(folder, table):
    issues = table("train/ants/3.png,label_error,0.9,ants,wasps,", "train/bees/0.png,dark,1,bees,,")
    train, _ = open_splits(settings(folder, relabel=issues))
    expected = labels_by_file(open_named(settings(folder), "train")) | {"train/ants/3.png": 2}
    assert labels_by_file(train) == expected
    assert (train.label_names, train.num_labels) == (["ants", "bees", "wasps"], 3)
    both, _ = open_splits(settings(folder, relabel=issues, exclude=issues))  # the relabeled image stays
    assert labels_by_file(both) == {file: label for file, label in expected.items() if file != "train/bees/0.png"}


@pytest.mark.parametrize("split", ["train", "train[4:]", "train[:30%]+train[50%:]"])
def test_rows_of_tables(tmp_path, table, split):
    images = [np.full((9, 9, 3), number, np.uint8) for number in range(10)]
    table_of(images, [0, 1] * 5, ["a", "b"]).to_parquet(tmp_path / "data" / "train.parquet")
    issues = table("train[7]", "train[0]", header="image")

    def files(split, **changes):
        rows = open_named(settings(tmp_path / "data", **changes), split).samples
        return [row["image"]["bytes"] for row in rows]

    left_out = {files("train")[row] for row in (0, 7)}
    assert files(split, exclude=issues) == [file for file in files(split) if file not in left_out]


@pytest.mark.parametrize(
    ("option", "lines", "header", "named"),
    [
        ("exclude", ["train/ants/99.png"], "image", "ants/99"),
        ("exclude", ["train[3]"], "image", "train\\[3\\]"),
        ("exclude", ["a,b,c"], "image", "issues.csv"),
        ("exclude", ["x"], "file", "file"),
        ("exclude", [",dark"], "image,issue", r"issues\.csv.* 2"),
        ("relabel", ["train/ants/1.png"], "image", "suggested"),
        ("relabel", ["train/ants/1.png,moths"], "image,suggested", "moths"),
        ("relabel", ["train/ants/1.png,bees", "train/ants/1.png,wasps"], "image,suggested", "bees .* wasps"),
    ],
)
def test_wrong_tables_are_refused(folder, table, option, lines, header, named):
    with pytest.raises(ValueError, match=named):
        open_splits(settings(folder, **{option: table(*lines, header=header)}))


def test_no_table_and_one_class_left_are_refused(folder, table, tmp_path):
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    for file in (tmp_path / "bytes.csv", tmp_path / "missing.csv", tmp_path):
        with pytest.raises(ValueError, match=file.name):
            open_splits(settings(folder, exclude=str(file)))
    others = [f"train/{kind}/{number}.png" for kind in ("ants", "wasps") for number in range(COUNTS[kind])]
    with pytest.raises(ValueError, match="bees"):
        open_splits(settings(folder, exclude=table(*others, header="image")))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_tables_of_spreadsheets(tmp_path, separator):
    """Excel writes a byte order mark, CRLF, semicolons in many languages, and rows whose cells were cleared."""
    text = "image,suggested,other\r\na.png,wasps,\r\n,,\r\n".replace(",", separator)
    (tmp_path / "issues.csv").write_bytes(text.encode("utf-8-sig"))
    assert read_issues(str(tmp_path / "issues.csv")) == [{"image": "a.png", "suggested": "wasps", "other": ""}]


def test_tables_are_read_as_written(tmp_path):
    issues = [Issue('a "b", c.png', "label_error", 0.5, "x", "ü"), Issue("d.png", "near_duplicate", 1, other="e.png")]
    write_issues(issues, tmp_path / "issues.csv")
    rows = read_issues(str(tmp_path / "issues.csv"))
    assert [row["image"] for row in rows] == ['a "b", c.png', "d.png"]
    assert [float(row["score"]) for row in rows] == [0.5, 1]
    assert [row["suggested"] for row in rows] == ["ü", ""]
