"""Linear probe: multinomial logistic regression on frozen features, with regularization chosen on held-out images."""

from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from ..settings.fields import EvaluateSettings
from .features import Extractor, open_train_and_test
from .predictions import TOP_K, cross_entropy, make_targets, score

_TOLERANCE = 1e-6  # of the gradient's largest entry


class LogisticRegression:
    """Minimum of mean cross-entropy + l2 / 2 |W|^2 over weights W and biases, which are not regularized.

    It equals scikit-learn's `LogisticRegression(C=1 / (images * l2))` on features of mean 0 and standard deviation 1.
    """

    def __init__(self, features: torch.Tensor, num_classes: int):
        self.mean, self.std = features.mean(dim=0), features.std(dim=0, correction=0).clamp(min=1e-8)
        self.weights = features.new_zeros(features.shape[1], num_classes)
        self.biases = features.new_zeros(num_classes)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """(images, features) -> (images, classes)"""
        return (features - self.mean) / self.std @ self.weights + self.biases

    def fit(self, features: torch.Tensor, labels: torch.Tensor, l2: float, max_steps: int = 1000) -> None:
        """Move from the current weights to the optimum, which is unique, since the problem is convex."""
        parameters = [self.weights.requires_grad_(), self.biases.requires_grad_()]
        optimizer = torch.optim.LBFGS(
            parameters,
            max_iter=max_steps,
            tolerance_grad=_TOLERANCE,
            tolerance_change=0.0,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def objective() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(self.logits(features), labels) + l2 / 2 * self.weights.square().sum()
            loss.backward()
            return loss

        optimizer.step(objective)
        self.weights, self.biases = (parameter.detach() for parameter in parameters)


def evaluate(settings: EvaluateSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Measure the test split after fitting on the whole training split; also return the choice of `l2`."""
    train, test = open_train_and_test(settings)
    extractor = Extractor(settings, accelerator)
    known = extractor.extract(train, settings.train_split)
    values, labels = known.values.to(accelerator.device), known.labels.to(accelerator.device)
    held_out = hold_out(len(known), settings.held_out, settings.seed).to(accelerator.device)
    accuracies = choose(values, labels, held_out, settings.probe_l2, train.num_labels)
    best = max(accuracies, key=lambda l2: (accuracies[l2], l2))  # of equal ones the largest
    regression = LogisticRegression(values, train.num_labels)
    regression.fit(values, labels, best)
    unknown = extractor.extract(test, settings.split or "test")
    logits = regression.logits(unknown.values.to(accelerator.device)).cpu()
    predictions = {
        "ranked": logits.topk(min(TOP_K, train.num_labels)).indices.numpy(),
        "loss": cross_entropy(logits, make_targets(unknown.labels, train.num_labels)).numpy(),
        "label": unknown.labels.numpy(),
        "index": unknown.index,
        "skipped": unknown.skipped,
    }
    return {**score(predictions), "l2": best, "held_out_accuracy": {str(l2): value for l2, value in accuracies.items()}}


def hold_out(count: int, share: float, seed: int) -> torch.Tensor:
    """Choose a random `share` of the images to hold out: (count,) bool; both parts have at least one image.

    Raises:
        ValueError: there are fewer than 2 images.
    """
    if count < 2:
        raise ValueError(f"a linear probe needs at least 2 training images, but the split has {count}")
    size = min(max(round(count * share), 1), count - 1)
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[torch.from_numpy(np.random.default_rng(seed).permutation(count)[:size])] = True
    return chosen


def choose(
    values: torch.Tensor, labels: torch.Tensor, held_out: torch.Tensor, grid: list[float], num_classes: int
) -> dict[float, float]:
    """Return the held-out accuracy for each l2, in decreasing order; each fit starts from the previous solution."""
    regression = LogisticRegression(values[~held_out], num_classes)
    accuracies = {}
    for l2 in sorted(grid, reverse=True):
        regression.fit(values[~held_out], labels[~held_out], l2)
        right = regression.logits(values[held_out]).argmax(dim=1) == labels[held_out]
        accuracies[l2] = right.double().mean().item()
    return accuracies
