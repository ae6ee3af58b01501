"""The real ViT-Ti/16 on real photographs, by public functions."""

import csv
import zipfile

import numpy as np
import pytest
from transformers import pipeline

from hf_vit.conversion import convert, export
from hf_vit.loading import save_folder

from ..comparing import assert_same_file
from ..paths import ROOT
from ..tiny_models import load_model

CHECKPOINT = "weights/Ti_16-imagenet2012-res_224.npz"


@pytest.fixture(scope="module")
def folder(shared, tmp_path_factory):
    path = tmp_path_factory.mktemp("real") / "ti16"
    save_folder(path, *convert(shared / CHECKPOINT, labels="imagenet1k"))
    return path


def test_classifies_photographs_through_pipeline(folder, shared, tmp_path):
    """Top-1 and top-5 of 104 images, with the preset of the released file, "augreg", though it has another name."""
    with zipfile.ZipFile(shared / "data/imagenet_sample/images.zip") as archive:
        archive.extractall(tmp_path)
    with open(shared / "data/imagenet_sample/labels.csv") as file:
        labels = {row["file_name"]: int(row["label"]) for row in csv.DictReader(file)}
    paths = [image for image in tmp_path.rglob("*.*") if image.name in labels]
    classify = pipeline("image-classification", model=str(folder), top_k=5, batch_size=8)
    label_of = classify.model.config.label2id
    answers = [[label_of[entry["label"]] for entry in answer] for answer in classify(list(map(str, paths)))]
    top1 = np.mean([answer[0] == labels[path.name] for path, answer in zip(paths, answers, strict=True)])
    top5 = np.mean([labels[path.name] in answer for path, answer in zip(paths, answers, strict=True)])
    assert len(paths) == len(labels) == 104
    assert (round(100 * top1, 1), round(100 * top5, 1)) == (84.6, 98.1)


def test_the_first_output_of_the_readme(folder, run_command, monkeypatch):
    """By the same preset and class names as `augreg:Ti/16`, which needs a network."""
    monkeypatch.chdir(ROOT)
    expected = (ROOT / "README.md").read_text().partition("```text\n")[2].partition("```")[0]
    assert run_command(["predict", str(folder), "docs/grace_hopper.jpg", "--top-k", "3"]) == expected


def test_exports_to_a_bit_identical_npz(shared, folder, tmp_path):
    export(load_model(folder), tmp_path / "back.npz", "jax")
    assert_same_file(tmp_path / "back.npz", shared / CHECKPOINT)
