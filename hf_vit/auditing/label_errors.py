"""Probable label errors: images for which a linear probe on frozen features confidently predicts another class.

The probabilities are out of sample, as in confident learning (Northcutt et al., arXiv 1911.00068): cross-validation
predicts each image with a probe that was not trained on it. Three partitions into folds are averaged. An image is a
probable error if another class is at least twice as probable as its label. docs/clean_data.md compares this rule with
cleanlab's.
"""

import numpy as np
import torch
from torch.nn import functional as F

from ..evaluation.linear_probe import LogisticRegression

_FOLDS, _PARTITIONS = 5, 3
_L2 = (1.0, 0.1, 0.01, 0.001)  # regularizations to choose from, by the held-out log-likelihood
_RATIO = 0.5  # largest ratio of the label's probability to the best class's at which the label counts as wrong


def find_label_errors(features: torch.Tensor, labels: torch.Tensor, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Find images whose label is probably wrong.

    The only image of a class is never one of them, because a probe without it cannot predict its class.

    Args:
        features: (images, features)
        labels: (images,) class numbers

    Returns:
        Rows of the probable errors, and the probabilities (images, classes) out of sample.
    """
    partitions = [assign_folds(labels, seed) for seed in range(_PARTITIONS)]
    logs = torch.stack([cross_validate(features, labels, num_classes, folds) for folds in partitions])
    probabilities = logs.mean(dim=0).softmax(dim=1)
    own = probabilities.gather(1, labels[:, None]).squeeze(1)
    counts = labels.bincount(minlength=num_classes)
    errors = (own < _RATIO * probabilities.amax(dim=1)) & (counts[labels] > 1)
    return errors.nonzero().flatten().numpy(), probabilities.numpy()


def assign_folds(labels: torch.Tensor, seed: int) -> torch.Tensor:
    """Deal the shuffled images of each class to the folds in turn: (images,) fold numbers."""
    shuffled = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    folds = torch.empty_like(labels)
    folds[by_class] = torch.arange(len(labels)) % _FOLDS
    return folds


def cross_validate(features: torch.Tensor, labels: torch.Tensor, num_classes: int, folds: torch.Tensor) -> torch.Tensor:
    """Predict each fold by a probe of the other folds: (images, classes) log-probabilities."""
    results = torch.empty(len(_L2), len(labels), num_classes)
    for fold in folds.unique():
        held_out = folds == fold
        regression = LogisticRegression(features[~held_out], num_classes)
        for number, l2 in enumerate(_L2):  # each fit starts from the one before
            regression.fit(features[~held_out], labels[~held_out], l2, max_steps=100)
            results[number, held_out] = regression.logits(features[held_out]).log_softmax(dim=1)
    losses = torch.stack([F.nll_loss(values, labels) for values in results])
    return results[int(losses.argmin())]
