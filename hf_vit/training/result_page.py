"""Result page of a classifier, report.html, and its predictions.csv."""

import base64
import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from ..data.labels import distinguish, names_of
from ..data.splits import Split
from ..files.output import write_text
from ..files.pages import render_page
from ..files.versions import versions_of
from ..models.image_reading import ImageReadingError, load_image, to_mode
from . import curve_panels, outcome
from .confusion_figure import MOST_CLASSES, write_matrix
from .recipes import dump
from .run import Run, in_words
from .settings import AUTO

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
        predictions: the result of `measuring.predict`, with class numbers as labels.
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


def held_out_of(run: Run, split: Split | None, config: Any) -> HeldOut | None:
    """The predictions of a run's last evaluation; None where it had no images to classify.

    Args:
        split: the split of the evaluation.
        config: configuration of the model.
    """
    if split is None or not run.predictions:
        return None
    return HeldOut(run.predictions, split, names_of(config), Path(str(run.settings.dataset)))


def write_run_results(output: Path, run: Run, held_out: HeldOut, facts: Mapping[str, Any]) -> None:
    """Write the result page of a training run.

    Args:
        facts: the result of `reporting.card_data`.
    """
    settings, metrics = run.settings, facts["metrics"]
    base = facts["base_model"] or "a new model"
    speed = f"{metrics['train_images_per_second']:,.1f} images a second, with evaluations and checkpoints"
    sizes = settings.eval_patch_sizes or settings.patch_sizes
    early = f"; {run.num_steps:,} were planned" if run.step < run.num_steps else ""
    shown = {
        "data set": str(settings.dataset),
        "fine-tuned from" if facts["base_model"] else "trained from": facts["base_model"] or "random weights",
        "held out": "a tenth of the training images" if settings.eval_split == AUTO else str(settings.eval_split),
        **({"best": f"{in_words(metrics)}, in best/"} if metrics["best"] is not None else {}),
        "length": f"{run.step:,} optimiser steps of {settings.batch_size:,} images{early}",
        **({"throughput": speed} if metrics["train_images_per_second"] else {}),  # a resumed run may have no step left
        "device": facts["device"] + (f", {facts['processes']} processes" if facts["processes"] > 1 else ""),
        **({"patch size": f"{sizes[-1]} on this page, of {', '.join(map(str, sizes))}"} if sizes else {}),
        "date": facts["date"],
        "command": facts["command"],
    }
    about = About(title_of(base, settings.dataset), shown, dump(settings), run.history)
    write_results(output, held_out, about)


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
    scores = outcome.score_classes(labels, predicted)
    numbers = sorted(one.number for one in scores)
    names = held_out.names
    if 2 <= len(numbers) <= MOST_CLASSES:
        matrix = outcome.confusion_matrix(labels, predicted, numbers)
        write_matrix(matrix, {number: names[number] for number in numbers}, output / "confusion_matrix.png")
    scores = [one for one in scores if one.images]
    is_small = len(scores) <= _CARD_CLASSES
    shown = sorted(scores, key=lambda one: one.number) if is_small else scores[:_CARD_WORST]
    pairs = [] if len(numbers) <= MOST_CLASSES else outcome.mistaken_pairs(labels, predicted, _CARD_WORST)
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
    bins, calibration_error = outcome.reliability(probability, right)
    tops = (ranked == labels[:, None]).any(axis=1)
    return render_page(
        "hf_vit.training",
        "result_page.html.jinja",
        about=about,
        names=held_out.names,
        images=len(labels),
        right=int(right.sum()),
        interval=outcome.wilson_interval(int(right.sum()), len(labels)),
        top5=float(tops.mean()) if ranked.shape[1] == 5 < len(held_out.names) else None,
        skipped=held_out.predictions["skipped"],
        unlabelled=len(held_out.predictions["label"]) - len(labels),
        panels=curve_panels.draw_panels(about.history),
        frame=(curve_panels.WIDTH, curve_panels.HEIGHT),
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
    classes = outcome.score_classes(labels, predicted)
    numbers = sorted(one.number for one in classes)
    is_small = len(numbers) <= _MATRIX_CLASSES
    return {
        "numbers": numbers,
        "matrix": outcome.confusion_matrix(labels, predicted, numbers).tolist() if is_small else None,
        "pairs": [] if is_small else outcome.mistaken_pairs(labels, predicted, _LISTED_PAIRS),
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
