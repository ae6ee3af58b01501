"""Metrics of several labels against scikit-learn, and thresholds against a search."""

import csv

import numpy as np
import pytest
from datasets import ClassLabel, List
from sklearn.metrics import average_precision_score, f1_score

from hf_vit.data.splits import open_split
from hf_vit.inference.multi_label import average_precision, choose_thresholds, f1_scores, score_labels
from hf_vit.inference.result_page import HeldOut, write_results

from ..photographs import table_of, write_colors


@pytest.fixture(params=["continuous", "tied"])
def scored(request):
    """Scores and labels of 83 images and 7 classes; the last class is nobody's."""
    rng = np.random.default_rng(4)
    labels = (rng.random((83, 7)) < [0.5, 0.1, 0.02, 0.3, 0.9, 0.3, 0]).astype(np.float32)
    labels[0, :6] = 1
    scores = 1 / (1 + np.exp(-(rng.normal(size=(83, 7)) + 1.5 * labels)))
    return (scores.round(1) if request.param == "tied" else scores), labels


def test_average_precision_and_f1_are_those_of_scikit_learn(scored):
    scores, labels = scored
    ours = average_precision(scores, labels)
    expected = [average_precision_score(labels[:, number], scores[:, number]) for number in range(6)]
    np.testing.assert_allclose(ours[:6], expected, rtol=1e-12)
    assert np.isnan(ours[6])
    assert score_labels(scores, labels)["mean_average_precision"] == pytest.approx(np.mean(expected))
    predicted = scores >= 0.5
    micro, macro = f1_scores(predicted, labels > 0)
    assert micro == pytest.approx(f1_score(labels, predicted, average="micro"))
    assert macro == pytest.approx(f1_score(labels, predicted, average="macro", zero_division=0))


def test_no_threshold_has_a_better_f1(scored):
    scores, labels = scored
    thresholds = choose_thresholds(scores, labels)
    assert thresholds[6] == 0.5
    for number in range(6):
        best = max(f1_score(labels[:, number], scores[:, number] >= at) for at in np.append(scores[:, number], 0))
        ours = f1_score(labels[:, number], scores[:, number] >= thresholds[number])
        assert ours == pytest.approx(best)


def test_the_report_has_scores_labels_and_thresholds(tmp_path):
    names, folder = ["a<b>", "c", "d"], write_colors(tmp_path, ("blue",), data=4) / "data" / "blue"
    images = [{"bytes": None, "path": str(folder / f"{number}.png")} for number in range(4)]
    split = open_split(table_of(images, [[0], [0, 1], [], [1]], List(ClassLabel(names=names))))
    scores = np.array([[0.9, 0.1, 0.2], [0.3, 0.8, 0.1], [0.2, 0.7, 0.6], [0.1, 0.95, 0.3]], np.float32)
    indicators = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]], np.float32)
    predictions = {"scores": scores, "label": indicators, "index": np.arange(4), "skipped": 0}
    held_out = HeldOut(predictions, split, names, folder, thresholds=[0.25, 0.75, 0.65])
    write_results(tmp_path / "out", held_out, "model on data", {"device": "cpu"}, "seed: 0")
    with open(tmp_path / "out" / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["predictions"] for row in rows] == ["a<b>", "a<b>;c", "", "c"]
    assert [row["labels"] for row in rows] == ["a<b>", "a<b>;c", "", "c"]
    assert [row["file"] for row in rows] == ["0.png", "1.png", "2.png", "3.png"]
    assert [float(rows[0][name]) for name in names] == pytest.approx([0.9, 0.1, 0.2])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<b>" not in page
    assert "0.650" in page
