"""Metrics as `evaluate.Metric` classes, which work offline.

Predictions are ranked class indices, best first, so that processes do not exchange all logits.
"""

from collections.abc import Sequence

import datasets
import evaluate
import numpy as np

_CLASS = datasets.Value("int32")


class _RankedMetric(evaluate.Metric):
    def __init__(self, **kwargs):
        super().__init__(keep_in_memory=True, **kwargs)

    def _info(self):
        features = datasets.Features({"predictions": datasets.List(_CLASS), "references": _CLASS})
        return evaluate.MetricInfo(description=self.__doc__ or "", citation="", features=features)


class TopKAccuracy(_RankedMetric):
    """Share of samples whose label is among the first k predictions, for each k."""

    def __init__(self, ks: tuple[int, ...] = (1, 5), **kwargs):
        self.ks = ks
        super().__init__(**kwargs)

    def _compute(self, predictions, references):
        ranked, labels = np.asarray(predictions), np.asarray(references)
        hits = ranked == labels[:, None]
        return {_name_of(k): float(hits[:, :k].any(axis=1).mean()) for k in self.ks if k <= ranked.shape[1]}


def _name_of(k: int) -> str:
    return "accuracy" if k == 1 else f"top{k}_accuracy"


class MeanPerClassAccuracy(_RankedMetric):
    """Accuracy of each class, averaged over the classes that occur (Oxford Pets, Flowers, Caltech-101)."""

    def _compute(self, predictions, references):
        labels = np.asarray(references)
        hits = np.asarray(predictions)[:, 0] == labels
        present = np.bincount(labels) > 0
        per_class = np.bincount(labels, weights=hits)[present] / np.bincount(labels)[present]
        return {"mean_per_class_accuracy": float(per_class.mean())}


def set_accuracy(ranked: np.ndarray, label_lists: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return the shares of samples with one of their labels among the first and the first 5 predictions.

    Samples without labels are not counted. The first is ImageNet's ReaL accuracy (arXiv 2006.07159).
    """
    hits = [np.isin(row, labels) for row, labels in zip(ranked, label_lists, strict=True) if len(labels)]
    return {_name_of(k): float(np.mean([hit[:k].any() for hit in hits])) for k in (1, 5) if hits and k <= len(hits[0])}
