"""`hf_vit.audit`: the issues of a data set, as a table to edit and as pages of images to review."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ..data.issues import Issue, excluded_images, name_images, write_issues
from ..data.labels import match_to_split, require_labels, require_two_classes
from ..data.sources import names_of_splits
from ..data.splits import Split, open_named
from ..devices import start_accelerator
from ..evaluation.features import Extractor
from ..files.output import refuse_existing, write_text
from ..files.reading import read_text
from ..settings.fields import AUTO, AuditSettings, EvaluateSettings
from ..settings.recipes import build_settings
from .duplicates import find_near_duplicates
from .image_quality import Measures, find_outliers, find_poor_images, measure_split
from .label_errors import find_label_errors
from .sheets import KINDS, write_pages

_ORDER = ("train", "validation", "test")  # order of the splits: an image that is also in a later split is a leak


@dataclass
class AuditedImage:
    """An image of the data set, or of the data set that the model was trained on.

    Args:
        name: as in issues.csv.
        group: number of its split, in the order of training, validation and test; -1 for the other data set.
        file: {"bytes", "path"}
        label: name of its class.
        number: number of its class; -1 for the other data set, whose images have no issues themselves.
        features: (features,) of the model.
    """

    name: str
    group: int
    file: dict[str, Any]
    label: str
    number: int
    measures: Measures
    features: torch.Tensor


def audit(
    model: str | os.PathLike[str],
    dataset: str | os.PathLike[str],
    train: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> list[Issue]:
    """Find probable label errors, duplicates, leaks, outliers and poor images of a data set, as `hf-vit audit` does.

    Args:
        model: name on the Hub, or a folder; its features are compared, and it is not trained.
        dataset: a folder with a folder of images for each class, a name on the Hub, or parquet files.
        train: another data set, on which the model is trained; its images in `dataset` are leaks.
        output_dir: folder of issues.csv, audit.html and contact sheets; None: nothing is written.
        settings: other fields of `AuditSettings`, such as `splits=["train"]`; `hf-vit audit --help` explains each.

    Returns:
        The rows of issues.csv: image, issue, score, label, suggested, other.

    Raises:
        ValueError: a setting is unknown or wrong, or images have no label, several, or all the same.

    Example:
        >>> for issue in hf_vit.audit("ti16", "photographs", output_dir="audit"):
        ...     print(issue.image, issue.issue, issue.suggested)
    """
    own = {"model": str(model), "dataset": str(dataset), "train": None if train is None else str(train)}
    own["output_dir"] = None if output_dir is None else str(output_dir)
    chosen = build_settings(AuditSettings, {**settings, **own})
    return run_audit(chosen, start_accelerator(chosen))


def run_audit(settings: AuditSettings, accelerator: Accelerator, report: Path | None = None) -> list[Issue]:
    """Audit the data set of the settings; write the results to `output_dir`, and return the issues.

    Args:
        report: the report.html of a run, to which the pages are added.
    """
    if settings.output_dir:
        refuse_existing(Path(settings.output_dir) / "issues.csv", settings.overwrite)  # it may have been edited by hand
    splits = open_audited(settings)
    first = next(iter(splits.values()))  # the other splits are numbered like it
    classes = first.label_names or [f"class {number}" for number in range(first.num_labels)]
    shared = {one.name for one in fields(EvaluateSettings)} & {one.name for one in fields(AuditSettings)}
    extractor = Extractor(EvaluateSettings(**{name: getattr(settings, name) for name in shared}), accelerator)
    images: list[AuditedImage] = []
    unreadable: list[Issue] = []
    for (dataset, name), split in splits.items():
        is_other = dataset != settings.dataset
        raw = training_images(settings) if is_other else replace(settings, exclude=None, relabel=None)
        excluded = set() if is_other else excluded_images(settings)
        names = [one for one in name_images(open_named(raw, name, not is_other), raw, name) if one not in excluded]
        group = -1 if is_other else list(splits).index((dataset, name))
        found = extractor.extract(split, name)
        num_threads = (os.cpu_count() or 1) if settings.num_workers == AUTO else int(settings.num_workers)
        rows = {int(row): position for position, row in enumerate(found.index)}
        for row, one in enumerate(measure_split(split, extractor.model.config.num_channels, num_threads)):
            if one is None or row not in rows:
                unreadable += [] if is_other else [Issue(names[row], "unreadable", 1.0)]
                continue
            image = str(Path(dataset, names[row])) if is_other else names[row]
            number = -1 if is_other else int(found.labels[rows[row]])
            label = "" if is_other else classes[number]
            file = split.image(split.samples[row], row)
            images.append(AuditedImage(image, group, file, label, number, one, found.values[rows[row]]))
    issues = find_issues(images, classes) + unreadable
    if settings.output_dir and accelerator.is_main_process:
        output = Path(settings.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        write_issues(issues, output / "issues.csv")
        sections = write_pages(output, issues, {image.name: image.file for image in images}, str(settings.dataset))
        if report is not None and report.is_file():
            write_text(report, read_text(report).replace("</main>", sections + "</main>", 1))
    return issues


def open_audited(settings: AuditSettings) -> dict[tuple[str, str], Split]:
    """Open the splits of the data set, with the same class numbers, and the training images of the other data set.

    Raises:
        ValueError: images have no label or several, or all have the same.
    """
    dataset, config = str(settings.dataset), settings.dataset_config
    names = settings.splits or sorted(names_of_splits(dataset, config), key=_rank)
    opened = [(name, open_named(settings, name)) for name in names]
    for name, split in opened:
        require_labels(split, name)
        if split.multi_label:
            raise ValueError(f"cannot audit {name} of {dataset}: it has several labels per image (expected one)")
    first_name, first = opened[0]
    if all(split.label_names is None for _, split in opened):
        first = replace(first, num_labels=max(split.num_labels for _, split in opened))
    splits = {(dataset, name): match_to_split(first, split, first_name, name) for name, split in opened}
    if len(np.unique(np.concatenate([split.class_numbers() for split in splits.values()]))) == 1:
        require_two_classes(first, " and ".join(names))
    if settings.train not in (None, dataset):
        other = training_images(settings)
        found = names_of_splits(settings.train)
        for name in [name for name in found if name == "train"] or found:
            splits[settings.train, name] = open_named(other, name, needs_labels=False)
    return splits


def training_images(settings: AuditSettings) -> AuditSettings:
    """Return the settings of the other data set, whose labels are not used."""
    labels = dict.fromkeys(("label_column", "label_names", "num_labels"))
    return replace(settings, dataset=settings.train, dataset_config=None, exclude=None, relabel=None, **labels)


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def find_issues(images: Sequence[AuditedImage], classes: Sequence[str]) -> list[Issue]:
    """Return the issues of the images, sorted by kind, the clearest first; `classes` are the names of the classes."""
    own = [image for image in images if image.number >= 0]
    features, labels = torch.stack([image.features for image in own]), torch.tensor([image.number for image in own])
    errors, probabilities = find_label_errors(features, labels, len(classes))
    issues = []
    for row in errors:
        image, chances = own[row], probabilities[row]
        best = int(chances.argmax())
        score = float(chances[best] - chances[image.number])
        issues.append(Issue(image.name, "label_error", score, image.label, classes[best]))
    issues += find_repeated(images)
    poor = find_poor_images([image.measures for image in own]) | {"outlier": find_outliers(features)}
    for kind, scores in poor.items():
        issues += [Issue(own[row].name, kind, score, own[row].label) for row, score in scores.items()]
    return sorted(issues, key=lambda issue: (list(KINDS).index(issue.issue), -issue.score))


def find_repeated(images: Sequence[AuditedImage]) -> list[Issue]:
    """Return leaks, and exact and near duplicates within a split; the copy with the most pixels is not an issue."""
    measures = [image.measures for image in images]
    pictures = torch.from_numpy(np.stack([one.picture for one in measures]))
    pairs = find_near_duplicates(torch.stack([image.features for image in images]), pictures)
    by_digest: dict[str, int] = {}
    for row, one in enumerate(measures):
        if (first := by_digest.setdefault(one.digest, row)) != row:
            pairs[first, row] = 1.0
    same = list(range(len(images)))  # the first row that shows the same picture

    def root(row: int) -> int:
        while same[row] != row:
            row = same[row]
        return row

    for first, second in pairs:
        low, high = sorted((root(first), root(second)))
        same[high] = low
    sets: dict[int, list[int]] = {}
    for row in range(len(images)):
        sets.setdefault(root(row), []).append(row)
    issues = []
    for rows in (rows for rows in sets.values() if len(rows) > 1):
        for row in (row for row in rows if images[row].group >= 0):
            group = images[row].group
            beyond = [other for other in rows if images[other].group > group or images[other].group < 0]
            within = [other for other in rows if images[other].group == group]
            kept = max(within, key=lambda other: measures[other].width * measures[other].height)
            if not beyond and kept == row:
                continue
            scores = {other: pairs.get((min(row, other), max(row, other)), 0.0) for other in beyond or [kept]}
            other = max(scores, key=lambda other: scores[other])
            exact = measures[row].digest == measures[other].digest
            kind = "leak" if beyond else "exact_duplicate" if exact else "near_duplicate"
            score = scores[other] or max(value for pair, value in pairs.items() if row in pair)
            issues.append(Issue(images[row].name, kind, score, images[row].label, other=images[other].name))
    return issues
