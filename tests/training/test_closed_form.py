"""A head in closed form, against few-shot evaluation's solver and scikit-learn's Ridge, and changes of its classes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import Ridge

import hf_vit
from hf_vit.inference.least_squares import BIAS, EPSILON
from hf_vit.training.closed_form import FEATURES_FILE

from ..local_hub import commits_of
from ..photographs import write_colors
from ..tiny_models import load_model, save_tiny

QUIET = {"num_workers": 0, "eval_batch_size": 5}


def instant(model, dataset, output, **settings):
    return hf_vit.finetune(model, dataset, output, recipe="instant", **QUIET, **settings)


def logits_of(folder: Path, files: list) -> np.ndarray:
    model, processor = hf_vit.load(folder)
    with torch.inference_mode():
        return model(**processor(files, return_tensors="pt")).logits.numpy()


def files_of(folder: Path) -> list[str]:
    files = sorted(folder.rglob("*.png"))
    return [str(file) for file in files if not file.match("test/red/3.png")]  # the broken one


def by_ridge(features: np.ndarray, labels: np.ndarray, others: np.ndarray, l2: float) -> np.ndarray:
    """Scores of other features by scikit-learn, of the inputs and targets of big_vision's evaluators/fewshot_lsr.py."""

    def prepare(values):
        whitened = (values - features.mean(axis=0)) / (features.std(axis=0) + EPSILON)
        return np.pad(whitened, ((0, 0), (0, 1)), constant_values=BIAS)

    targets = 2.0 * np.eye(labels.max() + 1)[labels] - 1
    return Ridge(alpha=l2, fit_intercept=False, solver="svd").fit(prepare(features), targets).predict(prepare(others))


def test_the_head_is_the_solution_of_few_shot_evaluation(tiny, colors, tmp_path):
    metrics = instant(tiny, colors, tmp_path / "out", l2_reg=64)
    few_shot = {"protocol": "few_shot", "shots": [8], "seeds": 1, "l2_reg": [64.0], **QUIET}
    [row] = hf_vit.evaluate(tiny, colors, **few_shot)["few_shot"]
    assert metrics["accuracy"] == row["accuracy"] > 0.9
    assert (metrics["l2_reg"], metrics["samples"], metrics["skipped"], metrics["train_images"]) == (64, 14, 1, 24)
    train, test = (files_of(colors / split) for split in ("train", "test"))
    labels = np.repeat(np.arange(3), 8)
    features = [hf_vit.embed(tiny, files).astype(np.float64) for files in (train, test)]
    expected = by_ridge(features[0], labels, features[1], 64)
    np.testing.assert_allclose(logits_of(tmp_path / "out", test), expected, atol=1e-5)


@pytest.mark.parametrize("config", [{"pooling": "mean"}, {"pooling": "map"}, {"hybrid": True}], ids=str)
def test_other_encoders(config, colors, tmp_path):
    folder = save_tiny(tmp_path / "model", **config)
    assert instant(folder, colors, tmp_path / "out")["accuracy"] > 0.9
    if "hybrid" not in config:
        assert instant(folder, colors, tmp_path / "native", preset="native")["accuracy"] > 0.9


def test_the_folder_is_one_of_a_classifier(tiny, colors, tmp_path):
    """It predicts, is evaluated on the same images, calibrates, pushes without the features, and trains on."""
    out = tmp_path / "out"
    metrics = instant(tiny, colors, out)
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert {"report.html", "predictions.csv", "card_data.json", "recipe.yaml", FEATURES_FILE} <= {
        file.name for file in out.iterdir()
    }
    [[best]] = hf_vit.predict(out, colors / "test" / "green" / "1.png", top_k=1)
    assert best.label == "green"
    assert hf_vit.evaluate(out, colors, **QUIET)["accuracy"] == metrics["accuracy"]
    listed = json.loads((out / "card_data.json").read_text())["settings"]
    assert {"l2_reg", "closed_form"} <= listed.keys()
    assert "learning_rate" not in listed
    hf_vit.calibrate(out, write_colors(tmp_path / "more", test=8), tmp_path / "calibrated")
    [[calibrated]] = hf_vit.predict(tmp_path / "calibrated", colors / "test" / "green" / "1.png", top_k=1)
    assert calibrated.label == "green"
    assert calibrated.score > best.score  # scores of least squares lie between -1 and 1


def test_training_in_steps_goes_on_from_the_head(tiny, colors, tmp_path):
    """Its first loss is that of the head in closed form; a head of zeros has log 3."""
    metrics = instant(tiny, colors, tmp_path / "out", l2_reg=64)
    run = {"steps": 1, "learning_rate": 1e-12, "batch_size": 4, "report_to": "none", **QUIET}
    for number, (model, changes, expected) in enumerate(
        [
            (tmp_path / "out", {}, metrics["loss"]),
            (tmp_path / "out", {"head": "new", "keep_pre_logits": True}, np.log(3)),
            (tiny, {}, np.log(3)),
        ]
    ):
        trained = hf_vit.finetune(model, colors, tmp_path / str(number), **run, **changes)
        assert trained["loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["loss"] < 1
    with pytest.raises(ValueError, match="LABEL_0"):
        hf_vit.finetune(tiny, colors, tmp_path / "new", **run, head="keep")


def test_leave_one_out_accuracy_and_several_draws(tiny, colors, tmp_path):
    results = hf_vit.finetune(tiny, colors, tmp_path / "folds", recipe="instant", folds=2, audit=False, **QUIET)
    assert results["mean"]["accuracy"] > 0.9
    assert results["mean"]["leave_one_out_accuracy"] > 0.9


def without(colors: Path, name: str, root: Path) -> tuple[Path, Path]:
    """Divide a dataset into one without a class and one of that class alone."""
    rest = shutil.copytree(colors, root / "rest", ignore=shutil.ignore_patterns(name))
    for split in ("train", "test"):
        shutil.copytree(colors / split / name, root / "more" / split / name)
    return rest, root / "more"


@pytest.mark.parametrize("l2", ["auto", 4.0])
def test_added_and_removed_classes_equal_a_head_from_scratch(tiny, colors, tmp_path, l2):
    rest, more = without(colors, "green", tmp_path)
    whole, part = tmp_path / "whole", tmp_path / "part"
    expected = instant(tiny, colors, whole, l2_reg=l2)
    fewer = instant(tiny, rest, part, l2_reg=l2)
    before = {file.name: file.read_bytes() for file in part.iterdir() if file.is_file()}
    added = hf_vit.finetune(part, None, tmp_path / "added", add=str(more), l2_reg=l2, **QUIET)
    removed = hf_vit.finetune(whole, None, tmp_path / "removed", remove=["green"], l2_reg=l2, **QUIET)
    assert {file.name: file.read_bytes() for file in part.iterdir() if file.is_file()} == before
    names = ["l2_reg", "leave_one_out_accuracy", "train_images"]
    assert [added[name] for name in names] == pytest.approx([expected[name] for name in names])
    assert [removed[name] for name in names] == pytest.approx([fewer[name] for name in names])
    test = files_of(colors / "test")
    ours, theirs = (load_model(folder).config for folder in (whole, tmp_path / "added"))
    order = [ours.label2id[theirs.id2label[number]] for number in range(3)]
    assert order == [0, 2, 1]
    logits = logits_of(whole, test)[:, order]
    np.testing.assert_allclose(logits_of(tmp_path / "added", test), logits, atol=1e-6)
    np.testing.assert_allclose(logits_of(tmp_path / "removed", test), logits_of(part, test), atol=1e-6)
    assert added["samples"] == 5
    assert added["accuracy"] > 0.7


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"add": "train"}, "blue"),
        ({"remove": ["purple"]}, "purple"),
        ({"remove": ["blue", "red"]}, "1 class"),
        ({"remove": ["blue"], "dataset": "digits"}, "digits"),
        ({"remove": ["blue"], "image_size": 40}, "image_size"),
        ({"remove": ["blue"], "epochs": 3}, "epochs"),
    ],
    ids=str,
)
def test_changes_that_are_refused(settings, named, tiny, colors, tmp_path):
    instant(tiny, colors, tmp_path / "out")
    if "add" in settings:
        settings = {"add": str(colors)}
    settings = {"dataset": None, **settings}
    with pytest.raises(ValueError, match=named):
        hf_vit.finetune(tmp_path / "out", output_dir=tmp_path / "new", **settings, **QUIET)
    assert not (tmp_path / "new" / "model.safetensors").exists()


def test_other_models_and_damaged_features_are_refused(tiny, colors, tmp_path):
    with pytest.raises(ValueError, match=FEATURES_FILE):
        hf_vit.finetune(tiny, None, tmp_path / "new", remove=["LABEL_1"], **QUIET)
    instant(tiny, colors, tmp_path / "out")
    file = tmp_path / "out" / FEATURES_FILE
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=FEATURES_FILE):
        hf_vit.load(tmp_path / "out")


@pytest.mark.parametrize("name", ["learning_rate", "steps", "mixup_alpha", "lora_rank", "teacher", "ema_decay"])
def test_settings_of_steps_are_refused(name, tiny, colors, tmp_path):
    value = "model" if name == "teacher" else 1 if name in ("steps", "lora_rank") else 0.5
    with pytest.raises(ValueError, match=name):
        instant(tiny, colors, tmp_path / "out", **{name: value})


def test_a_push_leaves_the_features_out(tiny, colors, tmp_path, hub, client):
    instant(tiny, colors, tmp_path / "out")
    client(["push", tmp_path / "out", "acme/instant", "--license", "mit"])
    files = commits_of(hub, "acme/instant")[0]["files"]
    assert "model.safetensors" in files
    assert FEATURES_FILE not in files


def test_the_head_of_views_is_that_of_all_of_them(tiny, colors, tmp_path):
    metrics = instant(tiny, colors, tmp_path / "out", l2_reg=24, views=3)
    stored = load_file(tmp_path / "out" / FEATURES_FILE)["features"].double().numpy()
    test = files_of(colors / "test")
    expected = by_ridge(stored, np.repeat(np.arange(3), 24), hf_vit.embed(tiny, test).astype(np.float64), 24)
    np.testing.assert_allclose(logits_of(tmp_path / "out", test), expected, atol=1e-5)
    assert metrics["train_images"] == 24
    with pytest.raises(ValueError, match="views 3"):
        hf_vit.finetune(tmp_path / "out", None, tmp_path / "fewer", remove=["green"], **QUIET)
    fewer = hf_vit.finetune(tmp_path / "out", None, tmp_path / "fewer", remove=["green"], views=3, **QUIET)
    assert fewer["train_images"] == 16


def test_views_are_augmented(tiny, colors, tmp_path):
    """Without a crop, each view is the image or its mirror image; both occur, and other seeds draw others."""
    instant(tiny, colors, tmp_path / "out", views=4, crop="none")
    stored = load_file(tmp_path / "out" / FEATURES_FILE)["features"].unflatten(0, (24, 4)).numpy()
    files = files_of(colors / "train")
    whole = hf_vit.embed(tiny, files)
    mirrored = hf_vit.embed(tiny, [Image.open(file).transpose(Image.Transpose.FLIP_LEFT_RIGHT) for file in files])
    distances = [np.abs(stored - one[:, None]).max(axis=2) for one in (whole, mirrored)]
    is_mirrored = distances[1] < distances[0]
    assert distances[0][:, 0].max() < 1e-5
    assert not is_mirrored[:, 0].any()
    assert 20 < is_mirrored.sum() < 52  # 36 of 72 on average
    with pytest.raises(ValueError, match="mixup_alpha"):
        instant(tiny, colors, tmp_path / "new", views=2, mixup_alpha=0.5)
