"""k nearest neighbors by cosine similarity, with the weighted vote of DINO (arXiv 2104.14294)."""

from typing import Any

import torch
from accelerate import Accelerator
from torch.nn import functional as F

from ..settings.fields import EvaluateSettings
from .features import Extractor, open_train_and_test

_QUERIES = 256  # compared with all training images at once


def evaluate(settings: EvaluateSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Measure top-1 and top-5 accuracy for each number of neighbors.

    Raises:
        ValueError: there are fewer training images than neighbors.
    """
    train, test = open_train_and_test(settings)
    if max(settings.neighbors) > len(train):
        raise ValueError(
            f"--neighbors is {max(settings.neighbors)}, but {settings.train_split} has only {len(train)} images"
        )
    extractor = Extractor(settings, accelerator)
    known = extractor.extract(train, settings.train_split)
    unknown = extractor.extract(test, settings.split or "test")
    keys, labels = F.normalize(known.values).to(accelerator.device), known.labels.to(accelerator.device)
    hits = {count: torch.zeros(2, dtype=torch.long) for count in settings.neighbors}
    batches = zip(F.normalize(unknown.values).split(_QUERIES), unknown.labels.split(_QUERIES), strict=True)
    for queries, answers in batches:
        queries, answers = queries.to(accelerator.device), answers.to(accelerator.device)
        for count in settings.neighbors:
            votes = vote(queries, keys, labels, train.num_labels, count, settings.temperature)
            right = votes.topk(min(5, votes.shape[1])).indices == answers[:, None]
            hits[count] += torch.stack([right[:, 0].sum(), right.sum()]).cpu()
    rows = []
    for count, found in hits.items():
        top1, top5 = found.tolist()
        rows.append({"neighbors": count, "accuracy": top1 / len(unknown), "top5_accuracy": top5 / len(unknown)})
    return {"knn": rows, "samples": len(unknown), "skipped": known.skipped + unknown.skipped}


def vote(
    queries: torch.Tensor, keys: torch.Tensor, labels: torch.Tensor, num_classes: int, count: int, temperature: float
) -> torch.Tensor:
    """Sum the votes of the `count` nearest keys for their classes, each exp(cosine / temperature).

    Args:
        queries, keys: (queries, features) and (keys, features), of length 1
        labels: (keys,) class numbers

    Returns:
        (queries, classes)
    """
    similarities, nearest = (queries @ keys.T).topk(min(count, len(keys)))  # (queries, count)
    votes = queries.new_zeros(len(queries), num_classes)
    return votes.scatter_add_(1, labels[nearest], ((similarities - 1) / temperature).exp())  # - 1: no overflow
