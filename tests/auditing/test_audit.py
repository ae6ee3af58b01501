"""The audit of a folder with planted faults, as a function, a command and after training; and flipped labels."""

import csv
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit.auditing.audit import draw_sheet, find_label_errors
from hf_vit.data.issues import Issue, read_issues

from ..commands import audit as audit_script
from ..photographs import table_of
from ..processes import arguments

QUICK = {"num_workers": 0, "eval_batch_size": 8}


def named(issues, kind):
    return {issue.image: issue for issue in issues if issue.issue == kind}


@pytest.fixture(scope="module")
def audited(tiny, faulty, tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited") / "audit"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        return hf_vit.audit(tiny, faulty, output_dir=folder, **QUICK), folder


def test_planted_faults_are_found(audited):
    issues, folder = audited
    leak = named(issues, "leak")
    assert {name: issue.other for name, issue in leak.items()} == {"train/red/leak.jpg": "test/red/02.png"}
    exact, near = named(issues, "exact_duplicate"), named(issues, "near_duplicate")
    assert {name: issue.other for name, issue in exact.items()} == {"train/blue/twice.png": "train/blue/03.png"}
    assert {name: issue.other for name, issue in near.items()} == {"train/blue/near.jpg": "train/blue/05.png"}
    assert named(issues, "label_error")["train/red/wrong.png"].suggested == "blue"
    for kind in ("dark", "blurred"):
        assert f"train/red/{kind}.png" in named(issues, kind)
    assert set(named(issues, "tiny")) == {"train/blue/tiny.png"}
    assert set(named(issues, "odd_shape")) == {"train/blue/long.png"}
    assert set(named(issues, "unreadable")) == {"train/blue/broken.png"}
    rows = read_issues(str(folder / "issues.csv"))
    assert [(row["image"], row["issue"]) for row in rows] == [(issue.image, issue.issue) for issue in issues]
    assert list(rows[0]) == ["image", "issue", "score", "label", "suggested", "other"]
    with Image.open(folder / "leak.png") as sheet:
        assert min(sheet.size) > 100
    assert "data:image/png" in (folder / "audit.html").read_text(encoding="utf-8")


def flipped_clusters(share=0.05):
    """Features of 300 images in 4 clusters, and labels of which a share is wrong."""
    rng = np.random.default_rng(0)
    labels = np.arange(300) % 4
    features = rng.normal(size=(4, 11))[labels] * 2 + 1.2 * rng.normal(size=(300, 11))
    flipped = rng.permutation(300)[: round(300 * share)]
    labels[flipped] = (labels[flipped] + rng.integers(1, 4, len(flipped))) % 4
    return torch.from_numpy(features).float(), torch.from_numpy(labels), set(flipped.tolist())


def test_flipped_labels_are_found():
    features, labels, flipped = flipped_clusters()
    errors, probabilities = find_label_errors(features, labels, 4)
    found = set(errors.tolist())
    assert len(found & flipped) >= 0.9 * len(flipped)
    assert len(found & flipped) >= 0.8 * len(found)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    features, labels, _ = flipped_clusters(share=0)
    labels[7] = 4  # the only image of its class
    assert 7 not in find_label_errors(features, labels, 5)[0]


def test_an_edited_table_is_not_overwritten(tiny, faulty, tmp_path):
    hf_vit.audit(tiny, faulty, output_dir=tmp_path, splits=["test"], **QUICK)
    (tmp_path / "issues.csv").write_text("edited", encoding="utf-8")
    with pytest.raises((ValueError, FileExistsError), match=r"issues.csv"):
        hf_vit.audit(tiny, faulty, output_dir=tmp_path, splits=["test"], **QUICK)
    assert (tmp_path / "issues.csv").read_text(encoding="utf-8") == "edited"


def test_images_of_another_data_set_are_leaks(tiny, faulty, tmp_path):
    other = tmp_path / "other" / "train" / "any"
    other.mkdir(parents=True)
    for number in (1, 2):
        Image.open(faulty / "test" / "blue" / f"0{number}.png").resize((80, 66)).save(other / f"{number}.jpg")
    issues = hf_vit.audit(tiny, faulty, train=tmp_path / "other", splits=["test"], **QUICK)
    expected = {f"test/blue/0{number}.png": str(other / f"{number}.jpg") for number in (1, 2)}
    assert {name: issue.other for name, issue in named(issues, "leak").items()} == expected
    assert not (tmp_path / "audit").exists()


@pytest.mark.slow
def test_held_out_images_are_those_of_the_models_training(tiny, faulty, tmp_path):
    """predictions.csv of the run lists them; a training image of which they have a copy is a leak."""
    data = tmp_path / "data"
    for folder in ("blue", "red"):
        shutil.copytree(faulty / "test" / folder, data / folder)
        for file in sorted((data / folder).iterdir()):
            shutil.copy(file, file.with_name(f"copy_{file.name}"))
    hf_vit.finetune(tiny, data, tmp_path / "run", steps=1, batch_size=4, report_to="none", **QUICK)
    with open(tmp_path / "run" / "predictions.csv", newline="", encoding="utf-8") as table:
        held_out = {row["file"] for row in csv.DictReader(table)}
    copies = {name: str(Path(name).with_name(f"copy_{Path(name).name}")) for name in held_out if "copy_" not in name}
    copies |= {name: name.replace("copy_", "") for name in held_out if "copy_" in name}
    expected = {copy: name for name, copy in copies.items() if copy not in held_out}
    assert expected
    issues = hf_vit.audit(tmp_path / "run", data, **QUICK)
    assert {name: issue.other for name, issue in named(issues, "leak").items()} == expected


def test_the_table_corrects_the_data(tiny, faulty, audited):
    issues, folder = audited
    table = str(folder / "issues.csv")
    mended = hf_vit.audit(tiny, faulty, exclude=table, relabel=table, **QUICK)
    gone = {issue.image for issue in issues if not issue.suggested}
    assert not gone & {issue.image for issue in mended}
    assert not named(mended, "leak")
    assert not named(mended, "near_duplicate")
    assert "train/red/wrong.png" not in named(mended, "label_error")


def test_command(tiny, faulty, tmp_path, capsys):
    own = {"model": tiny, "dataset": faulty, "splits": "[train]", "output_dir": tmp_path / "out", **QUICK}
    issues = audit_script(arguments(**own))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["exact_duplicate", str(len(named(issues, "exact_duplicate")))] in lines


def test_training_links_the_audit_in_its_report(tiny, faulty, tmp_path):
    hf_vit.finetune(tiny, faulty, tmp_path / "run", steps=1, batch_size=4, audit=True, report_to="none", **QUICK)
    assert (tmp_path / "run" / "audit" / "issues.csv").is_file()
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    page = tmp_path / "run" / re.search(r'href="([^"]*audit[^"]*)"', report)[1]
    assert "train/red/leak.jpg" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("labels", "named"), [([0, None, 1, 0], r"1\D+4"), ([1, 1, 1, 1], r"\b4\b.*'b'")])
def test_data_without_labels_to_compare_are_refused(tiny, tmp_path, labels, named):
    images = [np.full((9, 9, 3), number, np.uint8) for number in range(4)]
    (tmp_path / "data").mkdir()
    table_of(images, labels, ["a", "b"]).to_parquet(tmp_path / "data" / "train.parquet")
    with pytest.raises(ValueError, match=named):
        hf_vit.audit(tiny, tmp_path / "data", **QUICK)
    with pytest.raises(ValueError, match=named):
        hf_vit.finetune(tiny, tmp_path / "data", tmp_path / "run", steps=1, **QUICK)
    assert not (tmp_path / "run").exists()


def test_one_readable_image_and_no_data_set_are_refused(tiny, tmp_path):
    table_of([np.zeros((9, 9, 3), np.uint8), b"no picture"], [0, 1], ["a", "b"]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"\b1\b"):
        hf_vit.audit(tiny, tmp_path, **QUICK)
    with pytest.raises(ValueError, match="nowhere"):
        hf_vit.audit(tiny, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="model"):
        audit_script(["--dataset", str(tmp_path)])


def test_a_sheet_shows_the_letters_of_european_languages():
    first, second = (draw_sheet([Issue("a.png", "dark", 0.5, label)], {}) for label in ("bär", "bür"))
    assert first.tobytes() != second.tobytes()
