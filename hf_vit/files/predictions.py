"""Outputs of models for images: features, and classes, with their form as text, JSON lines or CSV; without torch."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np

from .printable import printable


class Prediction(NamedTuple):
    """A class and its score."""

    label: str
    score: float  # probability; see `scores_of`


class TargetValue(NamedTuple):
    """A target of a regression and its predicted value."""

    label: str
    value: float


class Batch(NamedTuple):
    """Outputs for some of the images."""

    numbers: list[int]  # their indices among all images
    outputs: Any  # one for each of them
    unreadable: dict[int, Exception]  # ImageReadingError of the skipped images, by index


class ClassRule:
    """Rule for the classes of an image: the most likely ones, or those that reach a score.

    Args:
        labels: class names by index.
        thresholds: limits of the model, as of `stored_thresholds`.
        top_k: number of classes.
        threshold: instead of `top_k`, the score from which on classes are predicted; "auto": each class's own.
        coverage: instead of `top_k`, the share of images whose predicted set holds the right class, one that the model
            was calibrated for.
        reject: predict no class for an image that shows none of them, see `distances_to_classes`.
        is_regression: the labels are targets of numbers, which are all predicted, in their order.

    Raises:
        ValueError: threshold and coverage are given, or the model is not calibrated for coverage or rejection; or one
            of them is given for a regression.
    """

    def __init__(
        self,
        labels: Mapping[int, str],
        thresholds: Mapping[str, Any],
        top_k: int = 5,
        threshold: float | Literal["auto"] | None = None,
        coverage: float | None = None,
        reject: bool = False,
        is_regression: bool = False,
    ):
        if is_regression and (threshold is not None or coverage is not None or reject):
            raise ValueError("the model predicts numbers, not classes: threshold, coverage and reject must be unset")
        self.is_regression = is_regression
        self.labels = labels
        self.count = top_k if threshold is None and coverage is None else len(labels)
        self.lowest = _lowest_scores(thresholds, len(labels), threshold, coverage)
        self.limits = None
        if reject:
            self.limits = thresholds["rejection"] or []
            if len(self.limits) != len(labels):
                raise ValueError("the model has no rejection_thresholds: calibrate it first (hf-vit calibrate)")

    def classes(self, logits: np.ndarray, scores: np.ndarray) -> list[Any]:
        """Return the classes of each image, most likely first; of a regression, all targets.

        Args:
            logits, scores: (batch, num_labels) each, float32.
        """
        if self.is_regression:
            return [
                [TargetValue(self.labels[index], value) for index, value in enumerate(row)] for row in logits.tolist()
            ]
        order = np.argsort(-scores, axis=1, kind="stable")[:, : self.count]
        rejected = np.zeros(len(logits), bool)
        if self.limits is not None:
            rejected = distances_to_classes(logits, self.limits) > 0
        found = []
        for its_order, its_scores, is_rejected in zip(order.tolist(), scores.tolist(), rejected.tolist(), strict=True):
            likely = [] if is_rejected else its_order
            if self.lowest is not None:
                likely = [index for index in likely if its_scores[index] >= self.lowest[index]]
            found.append([Prediction(self.labels[index], its_scores[index]) for index in likely])
        return found


def _lowest_scores(
    thresholds: Mapping[str, Any],
    num_labels: int,
    threshold: float | Literal["auto"] | None,
    coverage: float | None,
) -> list[float] | None:
    """Return the score from which on each class is predicted; None for the most likely classes."""
    if threshold is not None and coverage is not None:
        raise ValueError(f"threshold is {threshold} and coverage {coverage}: choose one")
    if threshold is None and coverage is None:
        return None
    if coverage is not None:
        known = thresholds["coverage"]
        lowest: Any = known.get(str(float(coverage)))
        if lowest is None:
            calibrated = f"it must be {', '.join(known)}" if known else "calibrate the model first (hf-vit calibrate)"
            raise ValueError(f"coverage is {coverage}; {calibrated}")
    else:
        lowest = thresholds["auto"] if threshold == "auto" else float(threshold)  # pyright: ignore[reportArgumentType]
    return lowest if isinstance(lowest, list) else [lowest] * num_labels


def distances_to_classes(logits: np.ndarray, limits: list[float]) -> np.ndarray:
    """Return how far each image is beyond the limit of the class that it resembles most; above 0: none of the classes.

    The distance is that of the largest logit below the class's limit: the open-set score of Vaze et al., arXiv
    2110.06207, relative to each class.

    Args:
        logits: (batch, num_labels), float32.
        limits: `rejection_thresholds` of the model, of each class.

    Returns:
        (batch,), float32
    """
    return np.asarray(limits, np.float32)[logits.argmax(axis=1)] - logits.max(axis=1)


def unit_length(features: np.ndarray) -> np.ndarray:
    """Scale rows to length 1, except rows of zeros."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(lengths == 0, 1, lengths)


def predictions_writer(kind: str, file: TextIO, is_regression: bool = False) -> Callable[[str, list[Any]], None]:
    """Return a function that writes the predictions of an image, most likely first.

    Args:
        kind: "text", "jsonl" or "csv"; the header of a CSV is written at once.
        file: open text file.
        is_regression: they are of `TargetValue`, not `Prediction`.
    """
    if kind == "csv" and is_regression:
        values = Table(file, ["image", "label", "value"])
        return lambda image, predictions: values.extend([image, *entry] for entry in predictions)
    if kind == "csv":
        table = Table(file, ["image", "rank", "label", "score"])
        return lambda image, predictions: table.extend(
            [image, rank, entry.label, entry.score] for rank, entry in enumerate(predictions, start=1)
        )
    if kind == "jsonl":
        return lambda image, predictions: print(
            json.dumps({"image": image, "predictions": [entry._asdict() for entry in predictions]}), file=file
        )
    form = "10.4g" if is_regression else "6.1%"
    nothing = ["  none of the classes"]

    def write(image: str, predictions: list[Prediction]) -> None:
        lines = [f"  {number:{form}}  {printable(label)}" for label, number in predictions]
        print(printable(image), *(lines or nothing), sep="\n", file=file)

    return write


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
