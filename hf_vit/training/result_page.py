"""Reports of a run: report.html of a classifier, its predictions.csv, and the facts for its model card."""

import base64
import csv
import datetime
import io
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import datasets
import numpy as np

from ..data.labels import distinguish, names_of
from ..data.splits import Split
from ..files.output import write_json, write_text
from ..files.pages import render_page
from ..files.versions import versions_of
from ..models.image_reading import ImageReadingError, load_image, to_mode
from . import classification_report
from .console import describe_best
from .figures import MOST_CLASSES, PANELS, points_of, write_curve, write_matrix
from .launch import describe_device
from .recipes import dump
from .settings import AUTO

if TYPE_CHECKING:
    from .trainer import Trainer

_FIGURES = ("confusion_matrix.png", "learning_curve.png")  # of the model card
_PACKAGES = ("hf_vit", "torch", "transformers", "accelerate", "datasets")
WIDTH, HEIGHT = 460, 200  # size of a learning curve's frame, in SVG units
_MARKS = 4  # approximate number of marks on its axes
_PICTURES = 24  # number of images on each of the two contact sheets
_PICTURE_SIZE = 128  # pixels of the longer side; shown at 96 or more
_MATRIX_CLASSES = 12  # the largest matrix for a phone; with more classes, mistaken pairs are listed
_LISTED_PAIRS, _LISTED_CLASSES = 25, 200
_ROWS_AT_ONCE = 1000
_CARD_CLASSES, _CARD_WORST = 20, 10  # up to 20 classes are on the card, and of more the worst


@dataclass
class HeldOut:
    """Predictions of a classifier on the readable images of a split.

    Args:
        predictions: the result of `evaluation.predictions.predict`, with class numbers as labels.
        names: class names of the model, by number.
        folder: folder of the data set; names of its files are relative to it.
    """

    predictions: Mapping[str, Any]
    split: Split
    names: Sequence[str]
    folder: Path

    def __post_init__(self) -> None:
        self.names = distinguish(self.names)

    @property
    def is_single_label(self) -> bool:
        """Tell whether each image has one label or none, as the page requires."""
        return self.predictions["label"].ndim == 1

    def labelled(self, name: str) -> np.ndarray:
        """Return one column of the predictions, without images that have no label."""
        return self.predictions[name][self.predictions["label"] >= 0]

    def name_label(self, number: int) -> str:
        """Return the name of a class; empty for no label."""
        return self.names[number] if number >= 0 else ""


@dataclass
class About:
    """Content of the page besides the predictions."""

    title: str
    facts: dict[str, str]  # device, throughput and the like
    recipe: str
    history: Sequence[dict[str, Any]] = field(default_factory=list)


class _Picture(NamedTuple):
    file: str
    data: str  # as a data: URI
    label: str
    prediction: str
    probability: float


def write_run_reports(trainer: "Trainer", metrics: Mapping[str, Any]) -> None:
    """Write the learning curve, the facts for the model card, and the reports of a classifier's last evaluation."""
    output, facts, held_out = trainer.output, card_data(trainer, metrics), None
    write_curve(trainer.state.history, output / "learning_curve.png")
    if trainer.eval_split is not None and trainer.predictions:
        folder = Path(str(trainer.settings.dataset))
        held_out = HeldOut(trainer.predictions, trainer.eval_split, names_of(trainer.config), folder)
        facts |= write_card_results(output, held_out)
    facts["figures"] = [name for name in _FIGURES if (output / name).is_file()]
    write_json(output / "card_data.json", facts)
    if held_out is not None:
        write_results(output, held_out, _about_run(trainer, facts))


def card_data(trainer: "Trainer", metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about a run for its model card."""
    settings = trainer.settings
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "base_model": getattr(settings, "model", None),
        "dataset": settings.dataset,
        "train_split": settings.train_split,
        "eval_split": settings.eval_split,
        "fingerprint": trainer.identity["data"],
        "settings": {name: value for name, value in vars(settings).items() if name != "output_dir"},
        "metrics": {name: value for name, value in metrics.items() if "/" not in name},  # not those of classes
        "processes": trainer.accelerator.num_processes,
        "device": describe_device(trainer.accelerator.device),
        "versions": versions_of(_PACKAGES),
    }


def _about_run(trainer: "Trainer", facts: Mapping[str, Any]) -> About:
    settings, metrics, step = trainer.settings, facts["metrics"], trainer.state.step
    base = facts["base_model"] or "a new model"
    speed = f"{metrics['train_images_per_second']:,.1f} images a second, with evaluations and checkpoints"
    sizes = settings.eval_patch_sizes or settings.patch_sizes
    early = f"; {trainer.num_steps:,} were planned" if step < trainer.num_steps else ""
    shown = {
        "data set": str(settings.dataset),
        "fine-tuned from" if facts["base_model"] else "trained from": facts["base_model"] or "random weights",
        "held out": "a tenth of the training images" if settings.eval_split == AUTO else str(settings.eval_split),
        **({"best": f"{describe_best(metrics)}, in best/"} if metrics["best"] is not None else {}),
        "length": f"{step:,} optimiser steps of {settings.batch_size:,} images{early}",
        **({"throughput": speed} if metrics["train_images_per_second"] else {}),  # a resumed run may have no step left
        "device": facts["device"] + (f", {facts['processes']} processes" if facts["processes"] > 1 else ""),
        **({"patch size": f"{sizes[-1]} on this page, of {', '.join(map(str, sizes))}"} if sizes else {}),
        "date": facts["date"],
        "command": facts["command"],
    }
    return About(title_of(base, settings.dataset), shown, dump(settings), trainer.state.history)


def write_card_results(output: Path, held_out: HeldOut) -> dict[str, Any]:
    """Draw confusion_matrix.png of 2 to 30 classes, and return the results by class that the model card shows.

    Returns:
        "num_classes" that have images, and "classes" with their "name", "images" and "right": all of 20 or fewer, in
        order, and of more the 10 with the lowest accuracy. Of more classes than fit into the picture also
        "mistaken": label, prediction and number of images of the 10 pairs that are mistaken most. Nothing where no
        image has a label, or one may have several.
    """
    if not held_out.is_single_label or not len(held_out.labelled("label")):
        return {}
    labels, predicted = held_out.labelled("label"), held_out.labelled("ranked")[:, 0]
    scores = classification_report.score_classes(labels, predicted)
    numbers = sorted(one.number for one in scores)
    names = held_out.names
    if 2 <= len(numbers) <= MOST_CLASSES:
        matrix = classification_report.confusion_matrix(labels, predicted, numbers)
        write_matrix(matrix, {number: names[number] for number in numbers}, output / "confusion_matrix.png")
    scores = [one for one in scores if one.images]
    is_small = len(scores) <= _CARD_CLASSES
    shown = sorted(scores, key=lambda one: one.number) if is_small else scores[:_CARD_WORST]
    pairs = [] if len(numbers) <= MOST_CLASSES else classification_report.mistaken_pairs(labels, predicted, _CARD_WORST)
    return {
        "num_classes": len(scores),
        "classes": [{"name": names[one.number], "images": one.images, "right": one.right} for one in shown],
        **({"mistaken": [[names[label], names[other], count] for label, other, count in pairs]} if pairs else {}),
    }


def title_of(model: Any, dataset: Any) -> str:
    """Return a heading for a model and a data set, from names on the Hub or names of folders."""
    names = (Path(str(place)).expanduser() for place in (model, dataset))
    return " on ".join(name.resolve().name if name.exists() else str(name) for name in names)


def write_results(output: Path, held_out: HeldOut, about: About) -> None:
    """Write predictions.csv, and report.html if any image has a label.

    Nothing is written if images may have several labels.
    """
    if not held_out.is_single_label:
        return
    output.mkdir(parents=True, exist_ok=True)
    files = list(_name_files(held_out.split, held_out.folder.expanduser()))
    write_text(output / "predictions.csv", _as_csv(held_out, files))
    if len(held_out.labelled("label")):
        write_text(output / "report.html", _render(held_out, files, about))


def _name_files(split: Split, folder: Path) -> Iterator[str]:
    """Yield the file name of each image; empty if the data set does not know it."""
    if not isinstance(split.samples, datasets.Dataset):
        yield from [""] * len(split)
        return
    batches: Any = split.samples.select_columns(split.image_column).with_format("arrow").iter(_ROWS_AT_ONCE)
    for batch in batches:
        paths: Iterable[Any] = batch[split.image_column].combine_chunks().field("path").to_pylist()
        for path in paths:
            place = Path(path or "")
            yield place.relative_to(folder).as_posix() if place.is_relative_to(folder) else path or ""


def _as_csv(held_out: HeldOut, files: Sequence[str]) -> str:
    """Return CSV with a row per image: row in the split, file, label, and the top classes with probabilities."""
    found = held_out.predictions
    ranks = range(1, found["ranked"].shape[1] + 1)
    suffixes = ["", *(f"_{rank}" for rank in ranks[1:])]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "file", "label", *(name + s for s in suffixes for name in ("prediction", "probability"))])
    columns = (found[name] for name in ("index", "label", "ranked", "probabilities"))
    for index, label, ranked, probabilities in zip(*columns, strict=True):
        pairs = zip(ranked, probabilities, strict=True)
        best = [entry for number, value in pairs for entry in (held_out.names[number], f"{value:.6g}")]
        writer.writerow([index, files[index], held_out.name_label(label), *best])
    return text.getvalue()


def _render(held_out: HeldOut, files: Sequence[str], about: About) -> str:
    labels, ranked = held_out.labelled("label"), held_out.labelled("ranked")
    probability = held_out.labelled("probabilities")[:, 0]
    right = ranked[:, 0] == labels
    rows = np.argsort(-probability, kind="stable")
    mistakes = [row for row in rows if not right[row]]
    bins, calibration_error = classification_report.reliability(probability, right)
    tops = (ranked == labels[:, None]).any(axis=1)
    return render_page(
        "hf_vit.training",
        "result_page.html.jinja",
        about=about,
        names=held_out.names,
        images=len(labels),
        right=int(right.sum()),
        interval=classification_report.wilson_interval(int(right.sum()), len(labels)),
        top5=float(tops.mean()) if ranked.shape[1] == 5 < len(held_out.names) else None,
        skipped=held_out.predictions["skipped"],
        unlabelled=len(held_out.predictions["label"]) - len(labels),
        panels=draw_panels(about.history),
        frame=(WIDTH, HEIGHT),
        mistakes=list(_pictures(held_out, files, mistakes[:_PICTURES])),
        num_mistakes=len(mistakes),
        least_sure=list(_pictures(held_out, files, rows[::-1][:_PICTURES])),
        **_classes(labels, ranked[:, 0]),
        bins=bins,
        calibration_error=calibration_error,
        confidence=float(probability.mean()),
        version=versions_of(("hf_vit",))["hf_vit"],
    )


def _classes(labels: np.ndarray, predicted: np.ndarray) -> dict[str, Any]:
    """Content of the page by class: a confusion matrix for few classes, else the most frequent mistakes."""
    classes = classification_report.score_classes(labels, predicted)
    numbers = sorted(one.number for one in classes)
    is_small = len(numbers) <= _MATRIX_CLASSES
    return {
        "numbers": numbers,
        "matrix": classification_report.confusion_matrix(labels, predicted, numbers).tolist() if is_small else None,
        "pairs": [] if is_small else classification_report.mistaken_pairs(labels, predicted, _LISTED_PAIRS),
        "classes": classes[:_LISTED_CLASSES],
        "num_classes": len(classes),
    }


def _pictures(held_out: HeldOut, files: Sequence[str], rows: Iterable[int]) -> Iterator[_Picture]:
    """Yield thumbnails of some images with labels; an image that can no longer be read is omitted."""
    columns = [held_out.labelled(name) for name in ("index", "label", "ranked", "probabilities")]
    for row in rows:
        index, label, ranked, probabilities = (column[row] for column in columns)
        index, predicted = int(index), int(ranked[0])
        file = held_out.split.image(held_out.split.samples[index], index)
        with suppress(ImageReadingError):
            image = to_mode(load_image(file, lambda height, width: (_PICTURE_SIZE, _PICTURE_SIZE)), "RGB")
            image.thumbnail((_PICTURE_SIZE, _PICTURE_SIZE))
            content = io.BytesIO()
            image.save(content, "JPEG", quality=80)
            data = "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()
            names = held_out.names[int(label)], held_out.names[predicted]
            yield _Picture(files[index] or f"row {index}", data, *names, float(probabilities[0]))


class Line(NamedTuple):
    """One line of a panel."""

    name: str  # "training" or "held out"
    points: list[tuple[float, float]]


class Mark(NamedTuple):
    """A mark on an axis."""

    place: float
    text: str


class Panel(NamedTuple):
    """One plot; y is 0 at the top."""

    title: str
    lines: list[Line]
    columns: list[Mark]  # optimiser steps
    rows: list[Mark]


def draw_panels(history: Sequence[dict[str, Any]]) -> list[Panel]:
    """Return the panels of loss and accuracy, as far as the history has them."""
    return [panel for names in PANELS if (panel := _draw(history, *names))]


def _draw(history: Sequence[dict[str, Any]], title: str, training: str, held_out: str) -> Panel | None:
    found = points_of(history, training, held_out)
    values = [point for points in found.values() for point in points]
    if not values:
        return None
    steps, heights = zip(*values, strict=True)
    last, low, high = max(steps), min(0.0, *heights), max(1.0 if title == "accuracy" else 0.0, *heights)
    high = high if high > low else low + 1

    def place(step: float, value: float) -> tuple[float, float]:
        return round(step / last * WIDTH, 1), round((high - value) / (high - low) * HEIGHT, 1)

    lines = [Line(name, [place(*point) for point in points]) for name, points in found.items() if points]
    columns = [Mark(place(step, 0)[0], f"{step:,.0f}") for step in _ticks(0, last) if step == int(step)]
    rows = [
        Mark(place(0, value)[1], f"{value:.0%}" if title == "accuracy" else f"{value:g}") for value in _ticks(low, high)
    ]
    return Panel(title, lines, columns, rows)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two bounds: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / _MARKS
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = int(np.ceil(low / step - 1e-9))
    return [round(number * step, 10) for number in range(first, int(np.floor(high / step + 1e-9)) + 1)]
