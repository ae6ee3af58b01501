"""Predictions of a classifier, and their form as text, JSON lines or CSV."""

import csv
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TextIO

import torch

from ..models.configuration_hf_vit import scores_of, thresholds_of
from .messages import printable


class Prediction(NamedTuple):
    """A class and its score."""

    label: str
    score: float  # probability, or the value of a regression; see `scores_of`


def most_likely(
    logits: torch.Tensor, config: Any, top_k: int = 5, lowest: list[float] | None = None, reject: bool = False
) -> list[list[Prediction]]:
    """Return the `top_k` most likely classes of each image, most likely first.

    Args:
        logits: (batch, num_labels)
        config: configuration of the model: its class names, and its problem type.
        lowest: instead of `top_k`, the score from which on each class is returned, of `lowest_scores`.
        reject: return no class for an image that shows none of them, see `distances_to_classes`.
    """
    count = logits.shape[-1] if lowest is not None else min(top_k, logits.shape[-1])
    scores, indices = scores_of(logits, config).topk(count)
    rejected = distances_to_classes(logits, config) > 0 if reject else torch.zeros(len(logits), dtype=torch.bool)
    found = []
    for its_indices, its_scores, is_rejected in zip(indices.tolist(), scores.tolist(), rejected.tolist(), strict=True):
        pairs = [] if is_rejected else zip(its_indices, its_scores, strict=True)
        likely = [(index, score) for index, score in pairs if lowest is None or score >= lowest[index]]
        found.append([Prediction(config.id2label[index], score) for index, score in likely])
    return found


def distances_to_classes(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Return how far each image is beyond the limit of the class that it resembles most; above 0: none of the classes.

    The distance is that of the largest logit below the class's `rejection_thresholds`: the open-set score of Vaze et
    al., arXiv 2110.06207, relative to each class.

    Args:
        logits: (batch, num_labels)

    Returns:
        (batch,)

    Raises:
        ValueError: the model was not calibrated.
    """
    limits = getattr(config, "rejection_thresholds", None) or []
    if len(limits) != logits.shape[-1]:
        raise ValueError("the model has no rejection_thresholds: calibrate it first (hf-vit calibrate)")
    highest, indices = logits.float().max(dim=-1)
    return torch.tensor(limits, device=logits.device)[indices] - highest


def lowest_scores(
    config: Any, threshold: float | Literal["auto"] | None = None, coverage: float | None = None
) -> list[float] | None:
    """Return the score from which on each class is predicted; None for the most likely classes.

    Args:
        threshold: the same for all classes; "auto": each class's own (`label_thresholds`).
        coverage: share of images whose predicted set holds the right class, one that the model was calibrated for.

    Raises:
        ValueError: both are given, or the model is not calibrated for this coverage.
    """
    if threshold is not None and coverage is not None:
        raise ValueError(f"threshold is {threshold} and coverage {coverage}: choose one")
    if coverage is not None:
        known = getattr(config, "coverage_thresholds", None) or {}
        if (lowest := known.get(str(float(coverage)))) is None:
            calibrated = f"it must be {', '.join(known)}" if known else "calibrate the model first (hf-vit calibrate)"
            raise ValueError(f"coverage is {coverage}; {calibrated}")
        return [lowest] * config.num_labels
    if threshold is None:
        return None
    return thresholds_of(config) if threshold == "auto" else [float(threshold)] * config.num_labels


def predictions_writer(kind: str, file: TextIO, in_percent: bool = True) -> Callable[[str, list[Any]], None]:
    """Return a function that writes the predictions of an image, most likely first.

    Args:
        kind: "text", "jsonl" or "csv"; the header of a CSV is written at once.
        file: open text file.
        in_percent: write the scores of a text in percent, for probabilities.
    """
    if kind == "csv":
        table = Table(file, ["image", "rank", "label", "score"])
        return lambda image, predictions: table.extend(
            [image, rank, entry.label, entry.score] for rank, entry in enumerate(predictions, start=1)
        )
    if kind == "jsonl":
        return lambda image, predictions: print(
            json.dumps({"image": image, "predictions": [entry._asdict() for entry in predictions]}), file=file
        )
    form = "6.1%" if in_percent else "10.4g"
    nothing = ["  none of the classes"]
    return lambda image, predictions: print(
        image, *([f"  {entry.score:{form}}  {entry.label}" for entry in predictions] or nothing), sep="\n", file=file
    )


class Table:
    """Writer of CSV whose text is never computed as a formula (owasp.org/www-community/attacks/CSV_Injection)."""

    def __init__(self, file: TextIO, header: Iterable[Any]):
        self._writer = csv.writer(file, lineterminator="\n")
        self.extend([header])

    def extend(self, rows: Iterable[Iterable[Any]]) -> None:
        """Write rows."""
        self._writer.writerows([_as_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)


def _as_cell(text: str) -> str:
    text = printable(text)  # also \r, which the csv module leaves unquoted
    return f"'{text}" if _FORMULA.match(text) else text


_FORMULA = re.compile(r"[=@\t]|[+-](?![\d.]+(e[+-]?\d+)?$)")  # a number is no formula
