"""The solver of heads in closed form, against NumPy's solver and scikit-learn's Ridge."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from hf_vit.inference.least_squares import BIAS, EPSILON, L2_GRID, LeastSquares, class_targets


def scaled(features: np.ndarray, of: np.ndarray) -> np.ndarray:
    inputs = (features - of.mean(axis=0)) / (of.std(axis=0) + EPSILON)
    return np.concatenate([inputs, np.full((len(inputs), 1), BIAS)], axis=1)


def by_numpy(inputs: np.ndarray, targets: np.ndarray, l2: float) -> np.ndarray:
    """Solve the normal equations in float64, by the definition: (X^T X + l2)^-1 X^T Y."""
    return np.linalg.solve(inputs.T @ inputs + l2 * np.eye(inputs.shape[1]), inputs.T @ targets)


def problem(images: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.arange(images) % 4
    features = rng.normal(3, 5, (images, 29)) + rng.normal(0, 3, (4, 29))[labels]
    features[:, 7] = 2.5  # a feature that does not vary
    return features, labels


def solver_of(features: np.ndarray, labels: np.ndarray) -> LeastSquares:
    return LeastSquares(torch.from_numpy(features), class_targets(torch.from_numpy(labels), 4))


FEWER_AND_MORE_IMAGES_THAN_FEATURES = pytest.mark.parametrize("images", [12, 70])


@FEWER_AND_MORE_IMAGES_THAN_FEATURES
@pytest.mark.parametrize("l2", [0.5, 2.0**10])
def test_weights_equal_numpys_solver_and_scikit_learns_ridge(images, l2):
    features, labels = problem(images)
    solver = solver_of(features, labels)
    inputs = scaled(features, features)
    targets = np.where(np.eye(4)[labels] == 1, 1.0, -1.0)
    np.testing.assert_allclose(solver.weights(l2).numpy(), by_numpy(inputs, targets, l2), rtol=1e-8, atol=1e-9)
    ridge = Ridge(alpha=l2, fit_intercept=False, solver="svd").fit(inputs, targets)
    np.testing.assert_allclose(solver.weights(l2).numpy(), ridge.coef_.T, rtol=1e-6, atol=1e-9)
    unseen = np.random.default_rng(1).normal(3, 5, (5, 29))
    expected = ridge.predict(scaled(unseen, features))
    np.testing.assert_allclose(solver.scores(torch.from_numpy(unseen), l2).numpy(), expected, rtol=1e-6, atol=1e-6)
    weight, bias = solver.linear(l2)
    np.testing.assert_allclose(unseen @ weight.numpy().T + bias.numpy(), expected, rtol=1e-6, atol=1e-6)


@FEWER_AND_MORE_IMAGES_THAN_FEATURES
def test_leave_one_out_equals_one_solution_for_each_image(images):
    features, labels = problem(images)
    solver = solver_of(features, labels)
    inputs = scaled(features, features)
    targets = np.where(np.eye(4)[labels] == 1, 1.0, -1.0)
    errors = {}
    for l2 in L2_GRID:
        scores = np.empty_like(targets)
        for left_out in range(images):
            rest = np.arange(images) != left_out
            scores[left_out] = inputs[left_out] @ by_numpy(inputs[rest], targets[rest], l2)
        errors[l2] = np.square(scores - targets).mean()
        np.testing.assert_allclose(solver.leave_one_out(l2).numpy(), scores, rtol=1e-5, atol=1e-6)
    best = min(errors, key=errors.get)
    assert solver.choose_l2() == best
    assert L2_GRID[0] < best < L2_GRID[-1]
    assert (L2_GRID[0], L2_GRID[-1]) == (2**-6, 2**20)


def test_targets_of_several_labels():
    indicators = torch.tensor([[1.0, 0, 1], [0, 0, 0]])
    assert class_targets(indicators, 3).tolist() == [[1, -1, 1], [-1, -1, -1]]
    assert class_targets(torch.tensor([2, 0]), 3).tolist() == [[-1, -1, 1], [1, -1, -1]]


@FEWER_AND_MORE_IMAGES_THAN_FEATURES
@pytest.mark.parametrize("l2", [0.5, 2.0**10])
def test_leave_one_out_leaves_out_all_views_of_an_image(images, l2):
    features, labels = problem(images)
    features = features + np.random.default_rng(2).normal(size=(3, *features.shape))  # (views, images, features)
    features = features.swapaxes(0, 1).reshape(3 * images, -1)
    labels = labels.repeat(3)
    solver = LeastSquares(torch.from_numpy(features), class_targets(torch.from_numpy(labels), 4), views=3)
    inputs = scaled(features, features)
    targets = np.where(np.eye(4)[labels] == 1, 1.0, -1.0)
    found = solver.leave_one_out(l2).numpy()
    for image in (0, 1, images - 1):
        own = np.arange(3 * images) // 3 == image
        expected = inputs[own] @ by_numpy(inputs[~own], targets[~own], l2)
        np.testing.assert_allclose(found[own], expected, rtol=1e-6, atol=1e-8)
