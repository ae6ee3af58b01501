"""Losses against outputs of big_vision and optax (goldens/training/losses.npz), and by definition."""

import numpy as np
import pytest
import torch

from hf_vit.evaluation.predictions import cross_entropy, make_targets


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
    expected = originals[f"optax_smooth_labels/{smoothing}"]
    ours = make_targets(torch.from_numpy(originals["classes"]), 11, smoothing)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_smoothing_of_sigmoid_targets_goes_to_a_half():
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
