"""Metrics against counts by hand."""

import numpy as np
import pytest

from hf_vit.evaluation.metrics import MeanPerClassAccuracy, TopKAccuracy
from hf_vit.evaluation.predictions import drop_padding, score

RANKED = [[2, 1, 0], [0, 1, 2], [1, 2, 0], [0, 2, 1]]
LABELS = [2, 1, 0, 0]


def test_top_k():
    results = TopKAccuracy(ks=(1, 2, 5)).compute(predictions=RANKED, references=LABELS)
    assert results == {"accuracy": 0.5, "top2_accuracy": 0.75}


def test_mean_per_class_weighs_classes_not_samples():
    ranked = [[0], [0], [0], [1]]
    results = MeanPerClassAccuracy().compute(predictions=ranked, references=[0, 0, 0, 3])
    assert results == {"mean_per_class_accuracy": 0.5}


def columns(**changes):
    base = {
        "index": np.array([3, -1, 0, 1, 2]),
        "valid": np.array([True, True, True, False, True]),
        "ranked": np.array([[1, 0], [0, 1], [0, 1], [0, 1], [1, 0]]),
        "label": np.array([1, 0, 0, 0, 0]),
        "loss": np.array([1.0, 9.0, 2.0, 9.0, 3.0]),
    }
    return {**base, **changes}


def test_padding_and_broken_images_do_not_count():
    predictions = drop_padding(columns())
    assert predictions["index"].tolist() == [0, 2, 3]
    results = score(predictions)
    assert (results["samples"], results["skipped"], results["loss"]) == (3, 1, 2.0)
    assert results["accuracy"] == pytest.approx(2 / 3)


def test_real_labels_follow_the_index():
    results = score(drop_padding(columns()), real_labels=[[0], [5], [1], []])
    assert results["real_accuracy"] == 1.0
    unlabeled = drop_padding(columns(label=np.full(5, -1)))
    of_real = {"real_accuracy", "real_images", "samples", "skipped"}
    assert score(unlabeled, real_labels=[[0], [5], [1], []]) == {name: results[name] for name in of_real}
    with pytest.raises(ValueError, match=r"3\D+3"):
        score(unlabeled)


def test_several_labels_count_the_first_prediction():
    labels = np.array([[0, 1], [0, 0], [1, 0], [1, 1], [1, 0]])
    scores = np.full((5, 2), 0.3)
    assert score(drop_padding(columns(label=labels, scores=scores)))["accuracy"] == pytest.approx(2 / 3)


def test_empty_evaluation_split_is_an_error():
    with pytest.raises(ValueError, match="split"):
        drop_padding({})
