"""Metrics as `evaluate.Metric` classes, which work offline; predictions are ranked class numbers, best first."""

import datasets
import evaluate
import numpy as np

from .predictions import mean_per_class_accuracy, top_k_accuracy

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
        return top_k_accuracy(np.asarray(predictions), references, self.ks)


class MeanPerClassAccuracy(_RankedMetric):
    """Accuracy of each class, averaged over the classes that occur (Oxford Pets, Flowers, Caltech-101)."""

    def _compute(self, predictions, references):
        return mean_per_class_accuracy(np.asarray(predictions), np.asarray(references))
