"""Results of a classifier on images with several labels: report.html and predictions.csv."""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..files.output import write_text
from ..files.pages import render_page
from ..files.predictions import Table
from ..files.versions import versions_of
from .multi_label import average_precision, score_labels
from .result_page import HeldOut, name_files, picture_data, thumbnail

_PICTURES = 24  # number of images on each of the two contact sheets


class _Picture(NamedTuple):
    file: str
    data: str  # as a data: URI
    label: str
    score: float
    labels: str  # all labels of the image


def write_multi_label_results(
    output: Path, held_out: HeldOut, title: str, facts: dict[str, str], recipe: str, curve: Path | None = None
) -> None:
    """Write predictions.csv and report.html; see `result_page.write_results`."""
    output.mkdir(parents=True, exist_ok=True)
    files = list(name_files(held_out.split, held_out.folder))
    scores, labels = held_out.predictions["scores"], held_out.predictions["label"] > 0
    predicted = scores >= np.asarray(held_out.thresholds)
    write_text(output / "predictions.csv", _as_csv(held_out, files, labels, predicted))
    about = {"title": title, "facts": facts, "recipe": recipe, "curve": picture_data(curve)}
    write_text(output / "report.html", _render(held_out, files, labels, predicted, **about))


def _as_csv(held_out: HeldOut, files: Sequence[str], labels: np.ndarray, predicted: np.ndarray) -> str:
    """Return CSV with a row per image: row in the split, file, labels, predicted labels, score of each class."""
    text, names = io.StringIO(), held_out.names
    table = Table(text, ["row", "file", "labels", "predictions", *names])
    columns = held_out.predictions["index"], labels, predicted, held_out.predictions["scores"]
    for index, its_labels, its_predictions, scores in zip(*columns, strict=True):
        joined = [
            ";".join(names[n] for n in np.flatnonzero(chosen).tolist()) for chosen in (its_labels, its_predictions)
        ]
        table.extend([[index, files[index], *joined, *(f"{score:.6g}" for score in scores)]])
    return text.getvalue()


def _render(held_out: HeldOut, files: Sequence[str], labels: np.ndarray, predicted: np.ndarray, **about: Any) -> str:
    scores, thresholds = held_out.predictions["scores"], held_out.thresholds
    precisions, counts = average_precision(scores, labels), labels.sum(axis=0)
    right = (labels & predicted).sum(axis=0)
    classes = [
        {
            "name": held_out.names[number],
            "images": int(counts[number]),
            "average_precision": float(precisions[number]) if counts[number] else None,
            "threshold": thresholds[number],
            "recall": right[number] / counts[number] if counts[number] else None,
            "precision": right[number] / predicted[:, number].sum() if predicted[:, number].any() else None,
        }
        for number in range(labels.shape[1])
    ]
    wrong, missed = np.argwhere(predicted & ~labels), np.argwhere(~predicted & labels)
    return render_page(
        "hf_vit.evaluation",
        "multi_label_page.html.jinja",
        **about,
        metrics=score_labels(scores, labels, thresholds),
        images=len(labels),
        labels=int(labels.sum()),
        skipped=held_out.predictions["skipped"],
        wrong=list(_pictures(held_out, files, wrong[np.argsort(-scores[tuple(wrong.T)], kind="stable")])),
        missed=list(_pictures(held_out, files, missed[np.argsort(scores[tuple(missed.T)], kind="stable")])),
        num_wrong=len(wrong),
        num_missed=len(missed),
        classes=sorted(classes, key=lambda one: (one["average_precision"] is None, one["average_precision"] or 0)),
        version=versions_of(("hf_vit",))["hf_vit"],
    )


def _pictures(held_out: HeldOut, files: Sequence[str], pairs: np.ndarray) -> Iterator[_Picture]:
    """Yield thumbnails of the first pairs of an image and a class; an image that cannot be read again is omitted."""
    found, names = held_out.predictions, held_out.names
    for row, number in pairs[:_PICTURES].tolist():
        index = int(found["index"][row])
        if (data := thumbnail(held_out.split, index)) is not None:
            labels = ", ".join(names[n] for n in np.flatnonzero(found["label"][row]).tolist()) or "no label"
            name = files[index] or f"row {index}"
            yield _Picture(name, data, str(names[number]), float(found["scores"][row, number]), labels)
