"""The linear probe, compared with scikit-learn's logistic regression."""

import numpy as np
import pytest
import torch

from hf_vit.evaluation.features import LogisticRegression, choose, hold_out
from hf_vit.scripts.evaluate import evaluate

from ..processes import arguments


def clusters(images: int, classes: int, features: int, noise: float):
    torch.manual_seed(0)
    labels = torch.arange(images) % classes
    return torch.randn(classes, features)[labels] + noise * torch.randn(images, features), labels


@pytest.mark.parametrize("l2", [0.003, 0.3])
def test_the_optimum_equals_scikit_learn(l2):
    sklearn = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is an optional extra")
    values, labels = clusters(83, 4, 11, noise=1.5)
    values = values.double() * 3 + 2
    ours = LogisticRegression(values, 4)
    ours.fit(values, labels, l2)
    whitened = ((values - values.mean(dim=0)) / values.std(dim=0, correction=0)).numpy()
    theirs = sklearn.LogisticRegression(C=1 / (83 * l2), tol=1e-10, max_iter=5000).fit(whitened, labels.numpy())
    probabilities = ours.logits(values).softmax(dim=1).numpy()
    np.testing.assert_allclose(probabilities, theirs.predict_proba(whitened), atol=1e-4)
    np.testing.assert_allclose(ours.weights.numpy(), theirs.coef_.T, atol=1e-4)


def test_regularization_is_chosen_on_held_out_images():
    values, labels = clusters(200, 3, 60, noise=4)
    held_out = hold_out(200, 0.25, seed=0)
    assert held_out.sum() == 50
    accuracies = choose(values, labels, held_out, [1e-6, 0.3, 1e4], 3)
    assert list(accuracies) == [1e4, 0.3, 1e-6]
    assert accuracies[0.3] >= max(accuracies[1e-6], accuracies[1e4])
    assert torch.equal(held_out, hold_out(200, 0.25, seed=0))
    assert (hold_out(2, 0.01, 0).sum(), hold_out(2, 0.9, 0).sum()) == (1, 1)
    with pytest.raises(ValueError, match=r" 1$"):
        hold_out(1, 0.5, 0)


def test_linear_probe_protocol(tiny, colors):
    settings = {"model": tiny, "dataset": colors, "num_workers": 0, "eval_batch_size": 5, "probe_l2": "[0.01, 1]"}
    results = evaluate(arguments(**settings, protocol="linear_probe"))
    assert results["accuracy"] > 0.9
    assert results["held_out_accuracy"].keys() == {"0.01", "1.0"}
    assert results["l2"] in (0.01, 1)
    assert (results["samples"], results["skipped"]) == (14, 1)
