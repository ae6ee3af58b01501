"""The real ViT-Ti/16 on real photographs, by public functions."""

import csv
import zipfile

import numpy as np
import pytest
from transformers import pipeline

from hf_vit.conversion import convert, export_jax
from hf_vit.loading import save_folder

from ..comparing import assert_same_file
from ..tiny_models import load_model

CHECKPOINT = "weights/Ti_16-imagenet2012-res_224.npz"


@pytest.fixture(scope="module")
def folder(shared, tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "ti16"
    save_folder(path, *convert(shared / CHECKPOINT, labels="imagenet1k"))
    return path


@pytest.fixture(scope="module")
def photographs(shared, tmp_path_factory):
    """(paths, class indices) of the ImageNet sample."""
    path = tmp_path_factory.mktemp("imagenet")
    with zipfile.ZipFile(shared / "data/imagenet_sample/images.zip") as archive:
        archive.extractall(path)
    with open(shared / "data/imagenet_sample/labels.csv") as file:
        rows = list(csv.DictReader(file))
    found = {image.name: image for image in path.rglob("*.*")}
    return [str(found[row["file_name"]]) for row in rows], [int(row["label"]) for row in rows]


def test_classifies_photographs_through_pipeline(folder, photographs):
    """Independent code with the original's resize and GELU: top-1 81.7% and top-5 96.2% of 104 images."""
    paths, labels = photographs
    classify = pipeline("image-classification", model=str(folder), top_k=5, batch_size=8)
    label_of = classify.model.config.label2id
    answers = [[label_of[entry["label"]] for entry in answer] for answer in classify(paths)]
    top1 = np.mean([answer[0] == label for answer, label in zip(answers, labels, strict=True)])
    top5 = np.mean([label in answer for answer, label in zip(answers, labels, strict=True)])
    assert len(paths) == 104
    assert (round(100 * top1, 1), round(100 * top5, 1)) == (81.7, 96.2)


def test_exports_to_a_bit_identical_npz(shared, folder, tmp_path):
    export_jax(load_model(folder), tmp_path / "back.npz")
    assert_same_file(tmp_path / "back.npz", shared / CHECKPOINT)
