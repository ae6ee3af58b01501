"""Losses, metrics and scaling of regression, against scikit-learn and scipy."""

import numpy as np
import pytest
import torch
from scipy.special import huber
from scipy.stats import spearmanr
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score
from sklearn.preprocessing import StandardScaler

from hf_vit.inference.regression import TargetScale, measure, regression_loss

RNG = np.random.default_rng(0)
TRUE = RNG.normal(size=(41, 3)) * (1, 1000, 1e-3) + (0, 2000, 5)
PREDICTED = TRUE + RNG.normal(size=(41, 3)) * (0.5, 300, 2e-3)


def test_losses():
    values, targets = (torch.from_numpy(one).float() for one in (PREDICTED[:, :2] / 100, TRUE[:, :2] / 100))
    expected = [mean_squared_error(one, other) for one, other in zip(targets.numpy(), values.numpy(), strict=True)]
    np.testing.assert_allclose(regression_loss(values, targets), expected, rtol=1e-5)
    expected = huber(0.7, (values - targets).double().numpy()).mean(axis=1)
    np.testing.assert_allclose(regression_loss(values, targets, "huber", 0.7), expected, rtol=1e-5)


def test_metrics():
    found = measure(PREDICTED, TRUE, ["a", "b", "c"])
    for column, name in enumerate("abc"):
        pair = TRUE[:, column], PREDICTED[:, column]
        assert found[f"mae/{name}"] == pytest.approx(mean_absolute_error(*pair))
        assert found[f"r2/{name}"] == pytest.approx(r2_score(*pair))
        assert found[f"spearman/{name}"] == pytest.approx(spearmanr(*pair).statistic)
        for metric in ("mae", "r2", "spearman"):
            low, high = found[f"{metric}_interval/{name}"]
            assert low < found[f"{metric}/{name}"] < high
    ties = np.array([[1.0], [1], [2], [3], [3], [3]]), np.array([[2.0], [1], [1], [5], [4], [4]])
    assert measure(*ties, ["a"])["spearman"] == pytest.approx(spearmanr(*ties).statistic)
    for predicted in (3.0, 2.0):  # scikit-learn's 1 and 0 for a constant target
        constant = np.full((5, 1), 3.0), np.full((5, 1), predicted)
        assert measure(constant[1], constant[0], ["a"])["r2"] == r2_score(*constant)
        assert "spearman" not in measure(constant[1], constant[0], ["a"])


def test_an_interval_holds_the_true_value():
    """Of 200 samples, the interval of the mean absolute error (0.798 for a normal error) misses at most 1 in 10."""
    held = 0
    for seed in range(200):
        errors = np.random.default_rng(seed).normal(size=(60, 1))
        low, high = measure(errors, np.zeros_like(errors), ["a"])["mae_interval"]
        held += low <= np.sqrt(2 / np.pi) <= high
    assert held >= 180


def test_scaling():
    scale = TargetScale(TRUE, ["a", "b", "c"])
    standard = StandardScaler().fit(TRUE)
    values = torch.from_numpy(PREDICTED)
    np.testing.assert_allclose(scale.standardize(values), standard.transform(PREDICTED), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(scale.restore(scale.standardize(values)), PREDICTED, rtol=1e-12)
    layer = torch.nn.Linear(7, 3).double()
    features = torch.randn(5, 7, dtype=torch.double)
    weight, bias = scale.fold(layer.weight, layer.bias)
    np.testing.assert_allclose(
        (features @ weight.T + bias).detach(), standard.inverse_transform(layer(features).detach().numpy()), rtol=1e-9
    )
    np.testing.assert_allclose(scale.unfold(weight, bias)[0].detach(), layer.weight.detach(), rtol=1e-9)
    np.testing.assert_allclose(scale.unfold(weight, bias)[1].detach(), layer.bias.detach(), rtol=1e-6)
    with pytest.raises(ValueError, match="b is 2"):
        TargetScale(np.array([[1.0, 2.0], [3.0, 2.0]]), ["a", "b"])
