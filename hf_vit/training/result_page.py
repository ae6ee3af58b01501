"""Which images a classifier gets right, and which wrong: report.html, and predictions.csv beside it."""

import base64
import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from ..files.output import write_text
from ..files.pages import render_page
from ..files.versions import versions_of
from . import curve_panels, outcome
from .data import Split, decode
from .labels import distinguish, names_of
from .recipes import dump
from .run import Run
from .settings import AUTO

_PICTURES = 24  # on each of the two contact sheets
_PICTURE_SIZE = 128  # pixels of the longer side; shown at 96 or more
_MATRIX_CLASSES = 12  # a larger matrix fits on no phone; then the mistaken pairs are listed
_LISTED_PAIRS, _LISTED_CLASSES = 25, 200
_ROWS_AT_ONCE = 1000


@dataclass
class HeldOut:
    """What a classifier says of the images of a split that could be read.

    Args:
        predictions: of `measuring.predict`, whose labels are class numbers.
        names: of the model's classes, by number.
        folder: of the data set; files in it are named as they are called there.
    """

    predictions: Mapping[str, Any]
    split: Split
    names: Sequence[str]
    folder: Path

    def __post_init__(self) -> None:
        self.names = distinguish(self.names)

    @property
    def is_single_label(self) -> bool:
        """Whether each image has one label, or none: what the page is about."""
        return self.predictions["label"].ndim == 1

    def labelled(self, name: str) -> np.ndarray:
        """One column of the predictions, of the images that have a label."""
        return self.predictions[name][self.predictions["label"] >= 0]

    def name_label(self, number: int) -> str:
        """The name of a class; empty for no label."""
        return self.names[number] if number >= 0 else ""


@dataclass
class About:
    """What the page says besides the predictions."""

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


def write_run_results(output: Path, run: Run, split: Split, config: Any, facts: Mapping[str, Any]) -> None:
    """Write the result page of a training run, from the predictions of its last evaluation.

    Args:
        split: what was evaluated on.
        config: of the model.
        facts: of `reporting.card_data`.
    """
    settings, metrics = run.settings, facts["metrics"]
    base = facts["base_model"] or "a new model"
    speed = f"{metrics['train_images_per_second']:,.1f} images a second, with evaluations and checkpoints"
    sizes = settings.eval_patch_sizes or settings.patch_sizes
    shown = {
        "data set": str(settings.dataset),
        "fine-tuned from" if facts["base_model"] else "trained from": facts["base_model"] or "random weights",
        "held out": "a tenth of the training images" if settings.eval_split == AUTO else str(settings.eval_split),
        "best": f"{run.best:.2%} after step {run.best_step:,}, in best/",
        "length": f"{run.num_steps:,} optimiser steps of {settings.batch_size:,} images",
        **({"throughput": speed} if metrics["train_images_per_second"] else {}),  # a resumed run may have no step left
        "device": facts["device"] + (f", {facts['processes']} processes" if facts["processes"] > 1 else ""),
        **({"patch size": f"{sizes[-1]} on this page, of {', '.join(map(str, sizes))}"} if sizes else {}),
        "date": facts["date"],
        "command": facts["command"],
    }
    about = About(title_of(base, settings.dataset), shown, dump(settings), run.history)
    write_results(output, HeldOut(run.predictions, split, names_of(config), Path(str(settings.dataset))), about)


def title_of(model: Any, dataset: Any) -> str:
    """A heading for a model and a data set: names on the Hub, or what folders are called."""
    names = (Path(str(place)).expanduser() for place in (model, dataset))
    return " on ".join(name.resolve().name if name.exists() else str(name) for name in names)


def write_results(output: Path, held_out: HeldOut, about: About) -> None:
    """Write predictions.csv and report.html; nothing where an image may have several labels.

    The page is left out where no image has a label.
    """
    if not held_out.is_single_label:
        return
    output.mkdir(parents=True, exist_ok=True)
    files = list(_name_files(held_out.split, held_out.folder.expanduser()))
    write_text(output / "predictions.csv", _as_csv(held_out, files))
    if len(held_out.labelled("label")):
        write_text(output / "report.html", _render(held_out, files, about))


def _name_files(split: Split, folder: Path) -> Iterator[str]:
    """The name of each image's file, as far as the data set knows it."""
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
    """A row for each image: its place in the split, file, label, and the most probable classes with probabilities."""
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
    """What the page shows by class: the whole matrix of a few classes, and of many the pairs mistaken most."""
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
    """Thumbnails of some of the images that have labels; one that cannot be read any more is left out."""
    columns = [held_out.labelled(name) for name in ("index", "label", "ranked", "probabilities")]
    for row in rows:
        index, label, ranked, probabilities = (column[row] for column in columns)
        index, predicted = int(index), int(ranked[0])
        sample = held_out.split.samples[index][held_out.split.image_column]
        image = decode(sample, lambda height, width: (_PICTURE_SIZE, _PICTURE_SIZE))
        if image is not None:
            image.thumbnail((_PICTURE_SIZE, _PICTURE_SIZE))
            content = io.BytesIO()
            image.convert("RGB").save(content, "JPEG", quality=80)
            data = "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()
            names = held_out.names[int(label)], held_out.names[predicted]
            yield _Picture(files[index] or f"row {index}", data, *names, float(probabilities[0]))
