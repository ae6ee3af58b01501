"""Metrics as `evaluate.Metric` classes, which work offline.

Predictions are ranked class numbers, best first, so that processes do not exchange all logits.
"""

import datasets
import evaluate
import numpy as np

_CLASS = datasets.Value("int32")


class _RankedMetric(evaluate.Metric):
    """Base of metrics of ranked predictions; `reference` is the type of their references."""

    reference: datasets.Value | datasets.List = _CLASS

    def __init__(self, **kwargs):
        super().__init__(keep_in_memory=True, **kwargs)

    def _info(self):
        features = datasets.Features({"predictions": datasets.List(_CLASS), "references": self.reference})
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


class SetTopKAccuracy(TopKAccuracy):
    """Share of samples with one of their labels among the first k predictions, for each k.

    Samples without labels are not counted.
    """

    reference = datasets.List(_CLASS)

    def _compute(self, predictions, references):
        pairs = [(ranked, set(labels)) for ranked, labels in zip(predictions, references, strict=True) if len(labels)]
        ks = [k for k in self.ks if pairs and k <= len(pairs[0][0])]
        return {
            _name_of(k): float(np.mean([not labels.isdisjoint(ranked[:k]) for ranked, labels in pairs])) for k in ks
        }


class RealAccuracy(SetTopKAccuracy):
    """ImageNet ReaL accuracy (arXiv 2006.07159): share of images whose first prediction is one of their labels.

    Images without labels are not counted.
    """

    def __init__(self, **kwargs):
        super().__init__(ks=(1,), **kwargs)

    def _compute(self, predictions, references):
        accuracy = super()._compute(predictions, references).get("accuracy", 0.0)
        return {"real_accuracy": accuracy, "real_images": sum(len(labels) > 0 for labels in references)}
