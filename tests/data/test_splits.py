"""Splits of the settings: an existing one for evaluation, or a tenth of each class; all images have labels."""

import datasets
import numpy as np
import pytest
from PIL import Image

from hf_vit.data.sources import load_split
from hf_vit.data.splits import Split, open_splits, split_into_folds, split_off_holdout
from hf_vit.settings.fields import FinetuneSettings

from ..photographs import table_of

COUNTS = {"ants": 31, "bees": 20, "wasps": 4}


def write_images(folder, counts):
    for kind, count in counts.items():
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (9, 7), (number, 0, 0)).save(folder / kind / f"{number}.png")


def settings_of(dataset, **changes) -> FinetuneSettings:
    return FinetuneSettings(dataset=str(dataset), model="model", **changes)


@pytest.mark.parametrize("name", ["val", "valid", "validation", "dev", "test"])
def test_existing_split_is_found(tmp_path, name):
    write_images(tmp_path / "train", {"ants": 3, "bees": 2})
    write_images(tmp_path / name, {"ants": 2, "bees": 2})
    settings = settings_of(tmp_path)
    split, eval_split = open_splits(settings)
    assert (len(split), len(eval_split)) == (5, 4)
    assert len(load_split(str(tmp_path), f"{name}[:3]")) == 3  # by its own name
    assert settings.eval_split == ("test" if name == "test" else "validation")  # as `datasets` calls it


def paths(split) -> list[str]:
    return [row["image"]["path"] for row in split.samples]


def assert_parts(train, held_out):
    """Each image is in one of the two."""
    assert len({*paths(train), *paths(held_out)}) == len(train) + len(held_out) == sum(COUNTS.values())


def test_a_tenth_of_each_class_is_held_out(tmp_path):
    write_images(tmp_path, COUNTS)
    settings = settings_of(tmp_path)
    split, held_out = open_splits(settings)
    assert_parts(split, held_out)
    labels = [held_out.label(row) for row in held_out.samples]
    assert np.bincount(labels, minlength=3).tolist() == [3, 2, 1]
    again, _ = open_splits(settings)
    assert paths(again) == paths(split)
    assert settings.eval_split == "auto"


def test_every_image_is_held_out_by_one_fold(tmp_path):
    write_images(tmp_path, COUNTS)
    split, _ = open_splits(settings_of(tmp_path, eval_split=None))
    counts = []
    for train, held_out in split_into_folds(split, 4):
        assert_parts(train, held_out)
        counts.append(np.bincount(held_out.class_numbers(), minlength=3))
    assert np.sum(counts, axis=0).tolist() == [31, 20, 4]
    assert np.ptp(counts, axis=0).max() <= 1
    with pytest.raises(ValueError, match="4"):
        split_into_folds(split, 5)


CLASS = datasets.ClassLabel(names=["ant", "bee", "wasp"])
TEXT, NUMBER = datasets.Value("string"), datasets.Value("int64")


def write_table(folder, feature, labels, split="train"):
    images = [np.zeros((9, 9, 3), np.uint8)] * len(labels)
    table_of(images, labels, feature).to_parquet(folder / f"{split}.parquet")


@pytest.mark.parametrize(
    ("feature", "labels", "message"),
    [
        (CLASS, [0, None, 1, -1], r"2\D+4"),
        (TEXT, ["bee", None, "ant"], r"1\D+3"),
        (datasets.List(CLASS), [[0, 1], None, [], [1]], r"1\D+4"),
        (datasets.List(TEXT), [["bee", None], ["ant"]], "label"),
        (datasets.List(TEXT), [[], []], "label"),
        (datasets.List(CLASS), [[], []], r"\b2\b.*train"),
        (datasets.List(NUMBER), [[0], [-1]], "-1"),
        (datasets.List(NUMBER), [[0], [10**12]], "1,000,000,000,001"),
        (NUMBER, [0, 10**12], "1,000,000,000,001"),
        (CLASS, [1, 1, 1], "'bee'"),
        (TEXT, ["bee", "bee"], "'bee'"),
        (datasets.List(TEXT), [["bee", "ant"], ["ant", "bee"]], "'ant', 'bee'"),
    ],
)
def test_images_without_labels_or_with_equal_ones_are_refused(tmp_path, feature, labels, message):
    write_table(tmp_path, feature, labels)
    with pytest.raises(ValueError, match=message):
        open_splits(settings_of(tmp_path))


def test_labels_of_the_evaluation_split_are_checked_too(tmp_path):
    write_table(tmp_path, CLASS, [0, 1, 1, 0])
    write_table(tmp_path, CLASS, [0, 1, None, 1], "test")
    with pytest.raises(ValueError, match=r"1\D+4"):
        open_splits(settings_of(tmp_path))
    split, _ = open_splits(settings_of(tmp_path, eval_split=None))
    assert split.class_numbers().tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(("count", "held_out"), [(9, None), (10, 4), (12, 4)])
def test_few_images(count, held_out):
    names = ["a", "b", "c", "d"]
    samples = table_of([None] * count, [number % 4 for number in range(count)], names)
    train, test = split_off_holdout(Split(samples, "image", "label", names, 4))
    assert (None if test is None else len(test)) == held_out
    assert len(train) + (held_out or 0) == count


def test_the_share_that_is_held_out_and_classes_without_a_held_out_image(tmp_path, caplog):
    write_images(tmp_path, {"ants": 20, "bees": 8, "wasps": 2, "owls": 1})
    train, held_out = open_splits(settings_of(tmp_path, eval_fraction=0.25))
    assert np.bincount(held_out.class_numbers(), minlength=4).tolist() == [5, 2, 0, 1]
    assert not set(paths(train)) & set(paths(held_out))
    assert any("evaluated" in line and "owls" in line for line in caplog.messages)


@pytest.mark.parametrize("spec", ["train[:98%]", "train[90%:]", "train[:5]+train[5:9]"])
def test_a_slice_of_a_folder_that_lacks_a_class_is_refused(tmp_path, spec):
    write_images(tmp_path, {"ants": 20, "bees": 18, "wasps": 1})
    with pytest.raises(ValueError, match="--eval-fraction"):
        open_splits(settings_of(tmp_path, train_split=spec))
    assert len(load_split(str(tmp_path), spec)) > 0  # it is what it is in `datasets`


def test_two_folders_of_one_split_need_a_choice(tmp_path):
    for name in ("train", "val", "valid"):
        write_images(tmp_path / name, {"ants": 4, "bees": 2})
    with pytest.raises(ValueError, match="--eval-split val"):
        open_splits(settings_of(tmp_path))
    _, chosen = open_splits(settings_of(tmp_path, eval_split="valid"))
    assert all("/valid/" in path for path in paths(chosen))
