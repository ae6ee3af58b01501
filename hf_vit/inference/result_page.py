"""Results of a classifier or a regression on a split: report.html, predictions.csv, and what the model card shows."""

import io
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from ..data.labels import distinguish
from ..data.splits import Split
from ..files.output import own_file, write_text
from ..files.pages import data_uri, render_page
from ..files.pictures import read_for_display
from ..files.predictions import Table
from ..models.image_reading import ImageReadingError
from ..models.relevance import NoRelevance, class_relevance, visible_image
from .batches import ImageReader
from .multi_label import average_precision, score_labels
from .regression_page import describe_regression, draw_scatter, list_values

_PICTURES = 24  # number of images on each of the two contact sheets
_PICTURE_SIZE = 128  # pixels of the longer side; shown at 96 or more
_MATRIX_CLASSES = 12  # the largest matrix that fits on a phone; with more classes, the mistakes are listed
_LISTED_PAIRS = 25
_DARK = 0.2  # brightness of patches that are not relevant
_CARD_CLASSES, _CARD_WORST = 20, 10  # the card lists up to 20 classes; if there are more, the 10 worst
MAX_MATRIX_CLASSES = 30  # in a picture; with more classes, names and numbers would be too small
_MAX_NAME_LENGTH = 24  # characters of a class name on an axis
_BINS = 15  # as in Guo et al., "On calibration of modern neural networks", arXiv 1706.04599, section 4
_Z = 1.96  # two-sided 95% quantile of the normal distribution


@dataclass
class HeldOut:
    """Predictions of a classifier on the readable images of a split.

    Args:
        predictions: the result of `evaluation.predictions.predict`, with class indices as labels.
        names: class names of the model, by number.
        folder: folder of the dataset; names of its files are relative to it.
        thresholds: lowest score at which each class is predicted, if images may have several labels.
        explain: function of an undecoded image and class indices that returns a picture of the relevance for each
            class, such as `Explanation`; None: no pictures.
    """

    predictions: Mapping[str, Any]
    split: Split
    names: Sequence[str]
    folder: Path
    thresholds: Sequence[float] = ()
    explain: "Callable[[dict[str, Any], list[int]], list[np.ndarray]] | None" = None

    def __post_init__(self) -> None:
        self.names = distinguish(self.names)

    @property
    def is_single_label(self) -> bool:
        """Return whether each image has one label or none."""
        return self.predictions["label"].ndim == 1

    @property
    def is_regression(self) -> bool:
        """Return whether images have targets, not labels."""
        return "values" in self.predictions

    def labeled(self, name: str) -> np.ndarray:
        """Return one column of the predictions, without images that have no label."""
        return self.predictions[name][self.predictions["label"] >= 0]

    def names_in(self, chosen: np.ndarray) -> list[str]:
        """Return the names of the classes that are True in (classes,)."""
        return [self.names[number] for number in np.flatnonzero(chosen).tolist()]

    @cached_property
    def files(self) -> list[str]:
        """Name of each image's file, relative to the folder; empty if the dataset has no file names."""
        folder = Path(os.path.abspath(self.folder.expanduser()))
        files = [(Path(os.path.abspath(path or "")), path or "") for path, _ in self.split.paths()]
        return [file.relative_to(folder).as_posix() if file.is_relative_to(folder) else path for file, path in files]

    def maps(self, index: int, classes: list[int]) -> list[dict[str, str]]:
        """Return the relevance of an image's patches for classes: their "name" and "data", a data: URI."""
        if self.explain is None:
            return []
        try:
            pictures = self.explain(self.split.image(self.split.samples[index], index), classes)
        except (ImageReadingError, NoRelevance):
            return []
        return [
            {"name": self.names[number], "data": as_jpeg(Image.fromarray(picture))}
            for number, picture in zip(classes, pictures, strict=True)
        ]

    def picture(self, index: int, **caption: Any) -> dict[str, Any]:
        """Return an image of the split for a contact sheet, with its caption."""
        data = thumbnail(self.split.image(self.split.samples[index], index))
        return {"file": self.files[index] or f"row {index}", "data": data, **caption}


def write_card_results(output: Path, held_out: HeldOut) -> dict[str, Any]:
    """Draw a figure for the model card, and return the results by class that it shows.

    The figure is confusion_matrix.png of 2 to 30 classes, or scatter.png of a regression.

    Returns:
        "num_classes" that have images, and "classes" with their "name", "images" and "right": all of 20 or fewer, in
        order, or else the 10 with the lowest accuracy. If there are more classes than fit into the picture, also
        "mistaken": label, prediction and number of images of the 10 most frequent mistakes. Empty if no image has a
        label, or an image may have several.
    """
    if held_out.is_regression:
        with own_file(output / "scatter.png") as file:
            file.write_bytes(draw_scatter(held_out))
        return {}
    if not held_out.is_single_label or not len(held_out.labeled("label")):
        return {}
    names, confusion = held_out.names, Confusion(held_out.labeled("label"), held_out.labeled("ranked")[:, 0])
    classes = [one for one in confusion.classes if one.images]
    is_small = len(classes) <= _CARD_CLASSES
    shown = sorted(classes) if is_small else classes[:_CARD_WORST]
    results: dict[str, Any] = {"num_classes": len(classes)}
    results["classes"] = [{"name": names[one.number], "images": one.images, "right": one.right} for one in shown]
    if 2 <= len(confusion.numbers) <= MAX_MATRIX_CLASSES:
        write_matrix(confusion, names, output / "confusion_matrix.png")
    elif mistakes := confusion.mistakes(_CARD_WORST):
        results["mistaken"] = [[names[label], names[other], count] for label, other, count in mistakes]
    return results


def title_of(model: Any, dataset: Any) -> str:
    """Return a heading for a model and a dataset, from names on the Hub or names of folders."""
    names = (Path(str(name)).expanduser() for name in (model, dataset))
    return " on ".join(name.resolve().name if name.exists() else str(name) for name in names)


def write_results(
    output: Path,
    held_out: HeldOut,
    title: str,
    facts: dict[str, str],
    recipe: str,
    curve: Path | None = None,
    audit: str = "",
) -> None:
    """Write predictions.csv, and report.html if any image has a label.

    Args:
        facts: device, throughput and the like.
        recipe: settings of the run, as YAML.
        curve: PNG of the learning curve.
        audit: page of `hf-vit audit` to link, relative to `output`.
    """
    output.mkdir(parents=True, exist_ok=True)
    single = held_out.is_single_label
    write_text(output / "predictions.csv", _as_csv(held_out))
    if single and not len(held_out.labeled("label")):
        return
    unlabeled = 0
    if held_out.is_regression:
        kind, content = "regression", describe_regression(held_out)
    elif single:
        kind, content = "result", _single_label(held_out)
        unlabeled = int((held_out.predictions["label"] < 0).sum())
    else:
        kind, content = "multi_label", _multi_label(held_out)
    content |= {
        "title": title,
        "names": held_out.names,
        "thresholds": held_out.thresholds,
        "facts": facts,
        "recipe": recipe,
        "audit": audit,
        "curve": "" if curve is None else data_uri("png", curve.read_bytes()),
        "skipped": held_out.predictions["skipped"],
        "unlabeled": unlabeled,
    }
    write_text(output / "report.html", render_page("hf_vit.inference", f"{kind}_page.html.jinja", **content))


def _as_csv(held_out: HeldOut) -> str:
    """Return CSV with a row per image: row in the split, file, label, and the top classes with probabilities.

    If an image may have several labels: labels, predicted labels, and the score of each class. Of a regression: the
    targets and their predictions.
    """
    found, names, rows = held_out.predictions, held_out.names, []
    if held_out.is_regression:
        header, *rows = list_values(held_out)
    elif held_out.is_single_label:
        ranks = ["", *(f"_{rank}" for rank in range(2, found["ranked"].shape[1] + 1))]
        header = ["label", *(name + rank for rank in ranks for name in ("prediction", "probability"))]
        for label, ranked, shares in zip(found["label"], found["ranked"], found["probabilities"], strict=True):
            best = [(names[number], f"{share:.6g}") for number, share in zip(ranked, shares, strict=True)]
            rows.append([names[label] if label >= 0 else "", *chain(*best)])
    else:
        header = ["labels", "predictions", *names]
        for labels, scores in zip(found["label"], found["scores"], strict=True):
            chosen = [";".join(held_out.names_in(one)) for one in (labels > 0, scores >= held_out.thresholds)]
            rows.append([*chosen, *(f"{score:.6g}" for score in scores)])
    text = io.StringIO()
    table = Table(text, ["row", "file", *header])
    table.extend([index, held_out.files[index], *row] for index, row in zip(found["index"], rows, strict=True))
    return text.getvalue()


def _single_label(held_out: HeldOut) -> dict[str, Any]:
    """Content of the page of a classifier with one label per image."""
    names = held_out.names
    index, labels, ranked = (held_out.labeled(name) for name in ("index", "label", "ranked"))
    predicted, probability = ranked[:, 0], held_out.labeled("probabilities")[:, 0]
    right = predicted == labels

    def show(rows: np.ndarray, explained: bool = False) -> list[dict[str, Any]]:
        return [
            held_out.picture(
                int(index[row]),
                label=names[int(labels[row])],
                prediction=names[int(predicted[row])],
                probability=float(probability[row]),
                maps=held_out.maps(int(index[row]), [int(labels[row]), int(predicted[row])]) if explained else [],
            )
            for row in rows[:_PICTURES]
        ]

    rows = np.argsort(-probability, kind="stable")
    mistakes = rows[~right[rows]]
    bins, error = reliability(probability, right)
    confusion = Confusion(labels, predicted)
    has_matrix = len(confusion.numbers) <= _MATRIX_CLASSES
    return {
        "images": len(labels),
        "right": int(right.sum()),
        "interval": wilson_interval(int(right.sum()), len(labels)),
        "top5": (ranked == labels[:, None]).any(axis=1).mean() if ranked.shape[1] == 5 < len(names) else None,
        "mistakes": show(mistakes, explained=True),
        "least_confident": show(rows[::-1]),
        "numbers": confusion.numbers,
        "matrix": confusion.matrix().tolist() if has_matrix else None,
        "pairs": [] if has_matrix else confusion.mistakes(_LISTED_PAIRS),
        "classes": confusion.classes,
        "bins": bins,
        "calibration_error": error,
        "confidence": float(probability.mean()),
    }


def _multi_label(held_out: HeldOut) -> dict[str, Any]:
    """Content of the page of a classifier with several labels per image."""
    scores, labels = held_out.predictions["scores"], held_out.predictions["label"] > 0
    predicted = scores >= held_out.thresholds
    counts = np.stack([chosen.sum(axis=0) for chosen in (labels, predicted, labels & predicted)], axis=1)
    classes = [ClassScore(number, *its_counts) for number, its_counts in enumerate(counts.tolist())]
    precisions = average_precision(scores, labels)

    def show(pairs: np.ndarray) -> list[dict[str, Any]]:
        """Show pairs of an image and a class, (pairs, 2)."""
        return [
            held_out.picture(
                int(held_out.predictions["index"][row]),
                label=held_out.names[number],
                score=float(scores[row, number]),
                labels=", ".join(held_out.names_in(labels[row])) or "no label",
            )
            for row, number in pairs[:_PICTURES]
        ]

    wrong, missed = np.argwhere(predicted & ~labels), np.argwhere(~predicted & labels)
    return {
        "average_precisions": precisions,
        "metrics": score_labels(scores, labels, held_out.thresholds),
        "images": len(labels),
        "labels": int(labels.sum()),
        "wrong": show(wrong[np.argsort(-scores[tuple(wrong.T)], kind="stable")]),
        "missed": show(missed[np.argsort(scores[tuple(missed.T)], kind="stable")]),
        "num_wrong": len(wrong),
        "num_missed": len(missed),
        "classes": sorted(classes, key=lambda one: (not one.images, precisions[one.number])),
    }


def thumbnail(file: dict[str, Any]) -> str | None:
    """Return an image of at most 128 x 128 pixels as a data: URI; None if it can no longer be read."""
    try:
        image = read_for_display(file, _PICTURE_SIZE)
    except ImageReadingError:
        return None
    return as_jpeg(image)


def as_jpeg(image: Image.Image) -> str:
    """Return an image, which gets at most 128 x 128 pixels, as a data: URI."""
    image.thumbnail((_PICTURE_SIZE, _PICTURE_SIZE))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=80)
    return data_uri("jpeg", content.getvalue())


class Explanation:
    """Pictures of what speaks for a class in an image: other patches are darker.

    Args:
        model: a classifier on one device.
        processor: its image processor.
    """

    def __init__(self, model: Any, processor: Any):
        self.model = model
        self.processor = processor
        self.reader = ImageReader(processor)

    def __call__(self, image: dict[str, Any], classes: list[int]) -> list[np.ndarray]:
        """Return a picture (height, width, 3) of uint8 for each class, of the pixels that the model gets.

        Raises:
            ImageReadingError: the image cannot be read.
            NoRelevance: the model has no attention over all tokens, or gets images as patches.
        """
        read = self.reader([(0, image)])
        for error in read.unreadable.values():
            raise error
        inputs = self.reader.finish(read.inputs, self.model.device)
        if "spatial_shapes" in inputs:
            raise NoRelevance("images are patches")
        pixel_values = inputs["pixel_values"]
        repeated = pixel_values.expand(len(classes), -1, -1, -1)
        maps = class_relevance(self.model, repeated, torch.tensor(classes))
        shares = maps / maps.amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(maps.dtype).tiny)
        light = F.interpolate(shares[:, None], size=pixel_values.shape[-2:], mode="bilinear")[:, 0].cpu().numpy()
        visible = visible_image(pixel_values[0].cpu(), self.processor)
        if visible.ndim == 2:
            visible = np.repeat(visible[..., None], 3, axis=2)
        return [(255 * visible * (_DARK + (1 - _DARK) * one[..., None])).astype(np.uint8) for one in light]


def write_matrix(confusion: "Confusion", names: Sequence[str], path: Path) -> None:
    """Draw a confusion matrix with the names of its classes, or the numbers where the font lacks a letter."""
    from matplotlib.figure import Figure
    from matplotlib.font_manager import findfont, get_font

    font = get_font(findfont("DejaVu Sans"))
    shown = []
    for number in confusion.numbers:
        is_in_font = all(font.get_char_index(ord(letter)) for letter in names[number])
        shown.append(names[number][:_MAX_NAME_LENGTH] if is_in_font else f"class {number}")
    matrix = confusion.matrix()
    inches = len(shown) * (0.5 if len(shown) <= 12 else 0.34)
    figure = Figure(figsize=(inches + 2.6, inches + 1.8), layout="constrained")
    axes = figure.subplots()
    axes.imshow(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1.5)
    for (row, column), count in np.ndenumerate(matrix):
        axes.text(column, row, str(count or "·"), ha="center", va="center", fontsize=8 if count < 1000 else 6)
    axes.set_xticks(range(len(shown)), shown, rotation=90, parse_math=False)
    axes.set_yticks(range(len(shown)), shown, parse_math=False)
    axes.set_xlabel("prediction")
    axes.set_ylabel("label")
    with own_file(path) as file:
        figure.savefig(file, dpi=120, bbox_inches="tight")


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


class Confusion:
    """Numbers of images of each label and prediction, (number,) each.

    Attributes:
        classes: the classes that occur in labels or predictions; the worst recall first.
        numbers: their numbers, in order.
    """

    def __init__(self, labels: np.ndarray, predicted: np.ndarray):
        self.pairs = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))
        images, predictions = Counter(labels.tolist()), Counter(predicted.tolist())
        self.numbers = sorted(images | predictions)
        scores = [ClassScore(one, images[one], predictions[one], self.pairs[one, one]) for one in self.numbers]
        self.classes = sorted(scores, key=lambda one: (one.images == 0, one.recall or 0.0, one.precision or 0.0))

    def matrix(self) -> np.ndarray:
        """Return the numbers of images of each label (rows) and prediction (columns), in the order of `numbers`."""
        return np.array([[self.pairs[label, other] for other in self.numbers] for label in self.numbers])

    def mistakes(self, most: int) -> list[tuple[int, int, int]]:
        """Return (label, prediction, number of images) of the most frequent mistakes."""
        found = [(label, other, count) for (label, other), count in self.pairs.items() if label != other]
        return sorted(found, key=lambda mistake: (-mistake[2], mistake))[:most]


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
    """Return the 95% confidence interval of a share by Wilson's score (J. Am. Stat. Assoc. 22, 1927)."""
    share, square = right / images, _Z**2 / images
    middle = (share + square / 2) / (1 + square)
    half = _Z / (1 + square) * (share * (1 - share) / images + square / (4 * images)) ** 0.5
    return max(middle - half, 0.0), min(middle + half, 1.0)
