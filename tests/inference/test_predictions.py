"""Losses against outputs of big_vision and optax (goldens/training/losses.npz); metrics against counts by hand."""

import numpy as np
import pytest
import torch

from hf_vit.inference.metrics import MeanPerClassAccuracy, TopKAccuracy
from hf_vit.inference.predictions import cross_entropy, drop_padding, make_targets, score


@pytest.fixture(scope="module")
def originals(goldens):
    """(6, 11) logits and labels, (6, 8, 5, 3) images, and the outputs of `big_vision.utils` and optax."""
    return np.load(goldens / "training" / "losses.npz")


@pytest.mark.parametrize("labels", ["one_hot", "mixed", "multi"])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_losses_and_gradients_equal_big_vision(originals, kind, labels):
    name = {"one_hot": "classes", "mixed": "mixup/1/labels", "multi": "multi_labels"}[labels]
    targets = make_targets(torch.from_numpy(originals[name]), 11, kind=kind)
    logits = torch.from_numpy(originals["logits"]).requires_grad_()
    losses = cross_entropy(logits, targets, kind)
    losses.mean().backward()
    expected = originals[f"{kind}_xent/{labels}"]
    np.testing.assert_allclose(losses.detach(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(logits.grad, originals[f"{kind}_xent/{labels}/grad"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
def test_smoothed_labels_equal_optax(originals, smoothing):
    """Those of the sigmoid, which optax has not, go to a half."""
    expected = originals[f"optax_smooth_labels/{smoothing}"]
    ours = make_targets(torch.from_numpy(originals["classes"]), 11, smoothing)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
    targets = make_targets(torch.tensor([1]), 3, 0.2, "sigmoid")
    torch.testing.assert_close(targets, torch.tensor([[0.1, 0.9, 0.1]]))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_weighted_losses_against_torch(kind):
    torch.manual_seed(0)
    logits, labels, weights = torch.randn(6, 4), torch.tensor([0, 3, 1, 1, 2, 0]), torch.tensor([0.5, 2, 1, 3])
    targets = make_targets(labels, 4, kind=kind)
    losses = cross_entropy(logits, targets, kind, weights)
    if kind == "softmax":
        expected = torch.nn.functional.cross_entropy(logits, labels, weights, reduction="none")
    else:
        judge = torch.nn.BCEWithLogitsLoss(weights, reduction="none")
        expected = judge(logits, targets).sum(1)
    torch.testing.assert_close(losses, expected)


def test_top_k_weighs_samples_and_mean_per_class_weighs_classes():
    ranked = [[2, 1, 0], [0, 1, 2], [1, 2, 0], [0, 2, 1]]
    results = TopKAccuracy(ks=(1, 2, 5)).compute(predictions=ranked, references=[2, 1, 0, 0])
    assert results == {"accuracy": 0.5, "top2_accuracy": 0.75}
    results = MeanPerClassAccuracy().compute(predictions=[[0], [0], [0], [1]], references=[0, 0, 0, 3])
    assert results == {"mean_per_class_accuracy": 0.5}


def columns(**changes):
    """Of four images: 1 is unreadable, one row is padding."""
    return {
        "index": np.array([3, -1, 0, 2]),
        "ranked": np.array([[1, 0], [0, 1], [0, 1], [1, 0]]),
        "label": np.array([1, 0, 0, 0]),
        "loss": np.array([1.0, 9.0, 2.0, 3.0]),
        **changes,
    }


def test_padding_and_broken_images_do_not_count_and_no_images_are_refused():
    predictions = drop_padding(columns(), 4)
    assert predictions["index"].tolist() == [0, 2, 3]
    results = score(predictions)
    assert (results["samples"], results["skipped"], results["loss"]) == (3, 1, 2.0)
    assert results["accuracy"] == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="split"):
        drop_padding({}, 0)


def test_real_labels_follow_the_index():
    results = score(drop_padding(columns(), 4), real_labels=[[0], [5], [1], []])
    assert results["real_accuracy"] == 1.0
    unlabeled = drop_padding(columns(label=np.full(4, -1)), 4)
    of_real = {"real_accuracy", "real_images", "samples", "skipped"}
    assert score(unlabeled, real_labels=[[0], [5], [1], []]) == {name: results[name] for name in of_real}
    with pytest.raises(ValueError, match=r"3\D+3"):
        score(unlabeled)


def test_several_labels_count_the_first_prediction():
    labels = np.array([[0, 1], [0, 0], [1, 0], [1, 0]])
    scores = np.full((4, 2), 0.3)
    assert score(drop_padding(columns(label=labels, scores=scores), 4))["accuracy"] == pytest.approx(2 / 3)
