"""Scores of a classifier by its problem type, wherever they are shown.

Compared with the logits in NumPy, float64, and by transformers' image classification pipeline on the same folder.
"""

import json

import numpy as np
import pytest
import torch
from transformers import pipeline

import hf_vit
from hf_vit.analysis.inspection import inspect

from ..tiny_models import save_tiny, write_images

KINDS = {
    "multi-label": {"problem_type": "multi_label_classification"},
    "single-label": {"problem_type": "single_label_classification"},
    "not stated": {},
    "one label": {"num_labels": 1},
    "regression": {"problem_type": "regression"},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS, scope="module")
def folder(request, tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", **request.param)


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    return str(write_images(tmp_path_factory.mktemp("pictures") / "of one", count=1) / "00.png")


@pytest.fixture
def expected(folder, picture):
    """{label: score}, highest first."""
    model, processor = hf_vit.load(folder)
    with torch.no_grad():
        logits = model(**processor(picture, return_tensors="pt")).logits[0].double().numpy()
    problem_type = model.config.problem_type
    if problem_type == "multi_label_classification" or len(logits) == 1:
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = logits if problem_type == "regression" else np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-scores)[:5]
    return {model.config.id2label[index]: scores[index] for index in order.tolist()}


def close(expected):
    return [(label, pytest.approx(score, abs=1e-6)) for label, score in expected.items()]


def test_functions_and_the_command(folder, picture, expected, run_command):
    """The text is in percent unless it is a regression, which has all its targets in their order."""
    is_regression = hf_vit.load(folder)[0].config.problem_type == "regression"
    key = "value" if is_regression else "score"

    def five_highest(predictions):
        return sorted(predictions, key=lambda prediction: -prediction[1])[:5]

    answers = pipeline("image-classification", model=str(folder), top_k=5)(picture)
    assert [(answer["label"], answer["score"]) for answer in answers] == close(expected)
    predicted = hf_vit.predict(hf_vit.load(folder), picture)[0]
    assert five_highest(predicted) == close(expected)
    printed = json.loads(run_command(["predict", folder, picture, "--json"]))["predictions"]
    assert five_highest((entry["label"], entry[key]) for entry in printed) == close(expected)
    shown = run_command(["predict", folder, picture]).splitlines()[1].split()[0]
    first = predicted[0][1]
    assert shown == (f"{first:.4g}" if is_regression else f"{100 * first:.1f}%")


@pytest.mark.parametrize("folder", [KINDS["regression"]], ids=["regression"], indirect=True)
def test_the_report(folder, picture, expected, tmp_path):
    assert inspect(*hf_vit.load(folder), [picture], tmp_path / "report", title="tiny") == []
    page = (tmp_path / "report" / "report.html").read_text()
    assert all(f"{score:.4g}" in page for score in expected.values())
