"""Predictions of a classifier, and their form as text, JSON lines or CSV."""

import csv
import json
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

import torch

from ..models.configuration_hf_vision import scores_of


class Prediction(NamedTuple):
    """A class and its score."""

    label: str
    score: float  # probability, or the value of a regression; see `scores_of`


def most_likely(logits: torch.Tensor, config: Any, top_k: int = 5) -> list[list[Prediction]]:
    """Return the `top_k` most likely classes of each image, most likely first.

    Args:
        logits: (batch, num_labels)
        config: configuration of the model: its class names, and its problem type.
    """
    scores, indices = scores_of(logits, config).topk(min(top_k, logits.shape[-1]))
    return [
        [Prediction(config.id2label[index], score) for index, score in zip(its_indices, its_scores, strict=True)]
        for its_indices, its_scores in zip(indices.tolist(), scores.tolist(), strict=True)
    ]


def predictions_writer(kind: str, file: TextIO, in_percent: bool = True) -> Callable[[str, list[Any]], None]:
    """Return a function that writes the predictions of an image, most likely first.

    Args:
        kind: "text", "jsonl" or "csv"; the header of a CSV is written at once.
        file: open text file.
        in_percent: write the scores of a text in percent, for probabilities.
    """
    if kind == "csv":
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["image", "rank", "label", "score"])
        return lambda image, predictions: table.writerows(
            [image, rank, entry.label, entry.score] for rank, entry in enumerate(predictions, start=1)
        )
    if kind == "jsonl":
        return lambda image, predictions: print(
            json.dumps({"image": image, "predictions": [entry._asdict() for entry in predictions]}), file=file
        )
    form = "6.1%" if in_percent else "10.4g"
    return lambda image, predictions: print(
        image, *(f"  {entry.score:{form}}  {entry.label}" for entry in predictions), sep="\n", file=file
    )
