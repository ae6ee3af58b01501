"""Metrics of images with several labels, and the threshold of each class above which it is predicted."""

from collections.abc import Iterator, Sequence

import numpy as np


def average_precision(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the average precision of each class: the sum of precision times the step in recall, without interpolation.

    Args:
        scores: (images, classes)
        labels: (images, classes), 1 for the labels of an image, else 0.

    Returns:
        (classes,); NaN for a class that no image has.
    """
    results = np.full(labels.shape[1], np.nan)
    for number, found, images, _ in _counts_by_threshold(scores, labels):
        precision, recall = found / images, found / found[-1]
        results[number] = (np.diff(recall, prepend=0) * precision).sum()
    return results


def _counts_by_threshold(
    scores: np.ndarray, labels: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """Count, for each class with images and each of its distinct scores, the images with at least that score.

    Yields:
        Number of the class; and, from the highest score on, the number of images that have the label, the number of all
        images, and the score.
    """
    for number, (score, label) in enumerate(zip(scores.T.astype(float), labels.T > 0, strict=True)):
        if label.any():
            order = np.argsort(-score, kind="stable")
            last = np.flatnonzero(np.append(np.diff(score[order]) != 0, True))  # of equal scores
            yield number, np.cumsum(label[order])[last], last + 1, score[order][last]


def choose_thresholds(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the threshold of each class with the best F1 score; 0.5 for a class that no image has.

    A threshold lies in the middle between the lowest score that is predicted and the next one below.
    """
    thresholds = np.full(labels.shape[1], 0.5)
    for number, found, images, at in _counts_by_threshold(scores, labels):
        best = int((2 * found / (images + found[-1])).argmax())
        thresholds[number] = (at[best] + (at[best + 1] if best + 1 < len(at) else 0)) / 2
    return thresholds


def f1_scores(predicted: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the F1 score over all labels (micro), and the mean of the classes' F1 scores (macro).

    A class that is neither predicted nor a label has an F1 score of 0, as in scikit-learn.

    Args:
        predicted, labels: (images, classes) bool.
    """
    right, wrong = (predicted & labels).sum(axis=0), (predicted ^ labels).sum(axis=0)
    each = 2 * right / np.maximum(2 * right + wrong, 1)
    return float(2 * right.sum() / max(2 * right.sum() + wrong.sum(), 1)), float(each.mean())


def score_labels(
    scores: np.ndarray, labels: np.ndarray, thresholds: Sequence[float] | np.ndarray | None = None
) -> dict[str, float]:
    """Return mean average precision over the classes that occur, and micro and macro F1 at the thresholds.

    Args:
        scores, labels: (images, classes)
        thresholds: (classes,); None: 0.5.
    """
    micro, macro = f1_scores(scores >= np.asarray(0.5 if thresholds is None else thresholds), labels > 0)
    precisions = average_precision(scores, labels)
    mean = float(np.nanmean(precisions)) if not np.isnan(precisions).all() else 0.0
    return {"mean_average_precision": mean, "micro_f1": micro, "macro_f1": macro}
