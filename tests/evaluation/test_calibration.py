"""Temperature and sets of classes, against scipy, scikit-learn's loss and the guarantee of conformal prediction."""

import json

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import binom
from sklearn.metrics import log_loss
from torch.nn.functional import softmax

import hf_vit
from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.cli import main
from hf_vit.data.sources import load_split
from hf_vit.evaluation import calibration
from hf_vit.files.output import refuse_existing
from hf_vit.hub.cards import render_folder_card

from ..tiny_models import tiny


def draw(images: int, temperature: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits of seven classes whose probabilities are right when divided by `temperature`."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(images, 7)) * 2
    cumulated = softmax(torch.from_numpy(logits), dim=1).numpy().cumsum(axis=1)
    labels = (cumulated < rng.random((images, 1))).sum(axis=1).clip(max=6)
    return logits * temperature, labels


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_the_temperature_has_the_lowest_loss(temperature):
    logits, labels = draw(3000, temperature)

    def loss(divisor: float) -> float:
        return log_loss(labels, softmax(torch.from_numpy(logits / divisor), dim=1).numpy(), labels=np.arange(7))

    best = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-8}).x
    assert calibration.fit_temperature(logits, labels) == pytest.approx(best, rel=1e-4)
    assert best == pytest.approx(temperature, rel=0.1)


def test_the_error_is_that_of_its_definition():
    logits, labels = draw(500, 2.5)
    probabilities = softmax(torch.from_numpy(logits), dim=1).numpy()
    error, confidence = 0.0, probabilities.max(axis=1)
    for lowest in range(15):
        rows = (confidence > lowest / 15) & (confidence <= (lowest + 1) / 15)
        right = probabilities.argmax(axis=1)[rows] == labels[rows]
        error += abs(right.sum() - confidence[rows].sum()) / len(labels)
    assert calibration.calibration_error(probabilities, labels) == pytest.approx(error)
    results = calibration.measure(*draw(4000, 2.5))["expected_calibration_error"]
    assert results["after"] < 0.03 < 0.1 < results["before"]


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95, 0.99])
def test_sets_hold_the_label_as_often_as_asked(coverage):
    """500 resamplings: the mean coverage is inside the band of binomial counts around the promise."""
    logits, labels = draw(20_000, 1.0, seed=3)
    own = softmax(torch.from_numpy(logits), dim=1).numpy()[np.arange(len(labels)), labels]
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(500):
        rows = rng.permutation(len(own))[:300]
        held += int((own[rows[200:]] >= calibration.coverage_threshold(own[rows[:200]], coverage)).sum())
    share = 1 - np.floor(201 * (1 - coverage) + 1e-9) / 201  # exact for continuous probabilities
    assert share >= coverage
    low, high = binom.interval(0.9999, 50_000, share)
    spread = 4 * np.sqrt(share * (1 - share) / 201 * 500) * 100  # the thresholds are drawn too
    assert low - spread <= held <= high + spread


def test_images_of_no_class_are_rejected():
    """5% of new images of the classes by NumPy's definition, and nearly all whose logits are far lower."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 5, 4000)
    logits = rng.normal(size=(4000, 7)) + np.eye(7)[labels] * (6 + np.arange(7))[labels, None]
    limits = calibration.rejection_limits(logits[:2000], labels[:2000])
    highest, predicted = logits[2000:].max(axis=1), logits[2000:].argmax(axis=1)
    assert (highest < limits[predicted]).mean() == pytest.approx(
        calibration.REJECTED, abs=4 * np.sqrt(0.05 * 0.95 / 1000)
    )
    means = [logits[:2000][labels[:2000] == number, number].mean() for number in range(5)]
    np.testing.assert_allclose(limits[:5] - limits[0], np.array(means) - means[0])
    assert (rng.normal(size=(500, 7)).max(axis=1) < limits.min()).mean() > 0.9
    measured = calibration.measure(logits, labels)["rejection"]["measured"]
    assert measured == pytest.approx(calibration.REJECTED, abs=0.02)


def test_a_calibrated_folder_has_divided_logits(tmp_path):
    model = tiny(image_size=8, patch_size=4, num_channels=1, num_labels=10)
    processor = HfViTImageProcessor.for_model(model.config)
    train = load_split("digits", "train[:600]")
    with torch.no_grad():
        features = model.vit(processor(list(train["image"]), return_tensors="pt").pixel_values).pooler_output
        targets = torch.nn.functional.one_hot(torch.tensor(train["label"]), 10) - 0.1
        model.classifier.weight.copy_(30 * torch.linalg.lstsq(features, targets).solution.T)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "card_data.json").write_text('{"dataset": "digits of scikit-learn"}')
    more = {"num_workers": 0, "eval_batch_size": 40}
    results = hf_vit.calibrate(tmp_path / "model", "digits", tmp_path / "calibrated", "test[:90]", **more)
    assert results == json.loads((tmp_path / "calibrated" / "calibration.json").read_text())
    parts = f"{tmp_path}/parts/"
    assert main(["embed", f"{tmp_path}/model", "--dataset", "digits", "--split", "test[:90]", "--output", parts]) == 0
    stored = hf_vit.calibrate(
        tmp_path / "model", "digits", tmp_path / "again", "test[:90]", embeddings=parts, num_workers=0
    )
    assert stored["temperature"] == pytest.approx(results["temperature"], rel=1e-4)
    calibrated = HfViTForImageClassification.from_pretrained(tmp_path / "calibrated")
    pixels = torch.rand(3, 1, 8, 8)
    expected = model(pixels).logits / results["temperature"]
    torch.testing.assert_close(calibrated(pixels).logits, expected, rtol=1e-5, atol=1e-5)
    assert calibrated.config.temperature == results["temperature"] > 1.5
    assert calibrated.config.coverage_thresholds["0.9"] == results["coverage"]["0.9"]["threshold"]
    assert len(calibrated.config.rejection_thresholds) == 10
    card = render_folder_card(tmp_path / "calibrated")
    assert f"| 90% | {results['coverage']['0.9']['measured']:.1%} |" in card
    assert "digits of scikit-learn" in card
    refuse_existing(tmp_path / "calibrated", overwrite=True)  # all its files are known, also the card's
    again = hf_vit.calibrate(tmp_path / "calibrated", "digits", tmp_path / "twice", "test[:90]", **more)
    assert again["temperature"] == pytest.approx(1, abs=1e-3)
    with pytest.raises(FileExistsError):
        hf_vit.calibrate(tmp_path / "model", "digits", tmp_path / "twice", "test[:90]", **more)
    with pytest.raises(ValueError, match="19"):
        hf_vit.calibrate(tmp_path / "model", "digits", tmp_path / "few", "test[:19]", **more)
    model.classifier.bias.data[3] = torch.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="NaN"):
        hf_vit.calibrate(tmp_path / "model", "digits", tmp_path / "nan", "test[:90]", **more)
    assert not (tmp_path / "nan").exists()
