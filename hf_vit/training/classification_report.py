"""Accuracy by class, by pair of classes, and by the model's confidence."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_BINS = 15  # as in Guo et al., "On calibration of modern neural networks", arXiv 1706.04599, section 4
_Z = 1.96  # two-sided 95 % quantile of the normal distribution


class ClassScore(NamedTuple):
    """Counts of one class, with its recall and precision."""

    number: int
    images: int  # with this label
    predictions: int  # of this class
    right: int

    @property
    def recall(self) -> float | None:
        """Share of the class's images that are predicted as it; None without images."""
        return self.right / self.images if self.images else None

    @property
    def precision(self) -> float | None:
        """Share of the class's predictions that are right; None without predictions."""
        return self.right / self.predictions if self.predictions else None


def score_classes(labels: np.ndarray, predicted: np.ndarray) -> list[ClassScore]:
    """Return the score of each class that occurs in labels or predictions, (number,) each; the worst recall first."""
    numbers = np.union1d(labels, predicted)
    size = int(numbers[-1]) + 1 if len(numbers) else 0
    counts = [np.bincount(chosen, minlength=size) for chosen in (labels, predicted, labels[labels == predicted])]
    scores = [ClassScore(int(number), *(int(count[number]) for count in counts)) for number in numbers]
    return sorted(scores, key=lambda one: (one.images == 0, one.recall or 0.0, one.precision or 0.0, one.number))


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, numbers: Sequence[int]) -> np.ndarray:
    """Count the images of each label (rows) and prediction (columns), for the sorted classes in `numbers`."""
    matrix = np.zeros((len(numbers), len(numbers)), int)
    np.add.at(matrix, (np.searchsorted(numbers, labels), np.searchsorted(numbers, predicted)), 1)
    return matrix


def mistaken_pairs(labels: np.ndarray, predicted: np.ndarray, most: int) -> list[tuple[int, int, int]]:
    """Return (label, prediction, number of images) of the most frequent mistakes."""
    wrong = labels != predicted
    pairs, counts = np.unique(np.stack([labels[wrong], predicted[wrong]], axis=1), axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:most]
    return [(int(pairs[row][0]), int(pairs[row][1]), int(counts[row])) for row in order]


class Bin(NamedTuple):
    """Predictions with a probability in (low, high]."""

    low: float
    high: float
    images: int
    confidence: float  # mean probability of the predicted class
    accuracy: float


def reliability(probability: np.ndarray, right: np.ndarray) -> tuple[list[Bin], float]:
    """Compare accuracy and probability in 15 bins of equal width; empty bins are omitted.

    Args:
        probability: (number,) probability of the predicted class.
        right: (number,) bool, True if the prediction is the label.

    Returns:
        The bins, and the expected calibration error: the mean difference of the two over all images.
    """
    edges = np.linspace(0, 1, _BINS + 1)
    numbers = np.clip(np.searchsorted(edges, probability, side="left") - 1, 0, _BINS - 1)
    bins = []
    for number in np.unique(numbers):
        chosen = numbers == number
        shares = float(probability[chosen].mean()), float(right[chosen].mean())
        bins.append(Bin(float(edges[number]), float(edges[number + 1]), int(chosen.sum()), *shares))
    error = sum(one.images * abs(one.confidence - one.accuracy) for one in bins) / max(len(right), 1)
    return bins, error


def wilson_interval(right: int, images: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share by Wilson's score (J. Am. Stat. Assoc. 22, 1927)."""
    share, square = right / images, _Z**2 / images
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * (share * (1 - share) / images + square / (4 * images)) ** 0.5
    return max(middle - half, 0.0), min(middle + half, 1.0)
