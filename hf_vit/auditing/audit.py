"""`hf_vit.audit`: the issues of a dataset, as a table to edit and as pages of images to review.

Probable label errors come from a linear probe on frozen features that confidently predicts another class. Its
probabilities are out of sample, as in confident learning (Northcutt et al., arXiv 1911.00068): cross-validation
predicts each image with a probe that was not trained on it. Three partitions into folds are averaged. An image is a
probable error if another class is at least twice as probable as its label. docs/clean_data.md compares this rule with
cleanlab's.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image, ImageDraw, ImageFont
from torch.nn import functional as F

from ..data.fingerprint import fingerprint_data
from ..data.issues import Issue, clean, name_images, write_issues
from ..data.labels import match_to_split, require_labels
from ..data.sources import names_of_splits
from ..data.splits import Split, assign_folds, divide, open_named, source_of
from ..data.summary import log_splits, write_unused
from ..data.workers import count_workers
from ..evaluation.features import Extractor, LogisticRegression
from ..evaluation.training_images import is_divided, read_record, rows_held_out
from ..files.output import own_file, refuse_existing, write_text
from ..files.pages import data_uri, page_color, render_page
from ..files.pictures import read_for_display, read_size
from ..loading import check_name
from ..models.image_reading import ImageReadingError, is_npy, read_image
from ..settings.fields import AuditSettings, EvaluateSettings
from ..settings.recipes import build_settings
from ..training.launch import start_accelerator
from .duplicates import SIDE, find_near_duplicates, nearest_neighbors

_KINDS = {
    "label_error": ("Probable label errors", "Each image with its label and the suggested class."),
    "leak": ("Leaks", "Training images that are also in an evaluation split (the image on the right)."),
    "exact_duplicate": ("Exact duplicates", "The same file twice; the image on the right is kept."),
    "near_duplicate": ("Near duplicates", "Re-encoded, resized, mirrored or cropped; the image on the right is kept."),
    "outlier": ("Outliers", "Images that resemble no other image."),
    "dark": ("Dark images", "Images whose lightest parts are dark."),
    "blurred": ("Blurred images", "Images with far less fine detail than the others."),
    "tiny": ("Tiny images", "Images with far fewer pixels than the others."),
    "odd_shape": ("Odd shapes", "Images that are far longer or wider than the others."),
    "unreadable": ("Unreadable images", "Images that training and evaluation skip."),
}
_SHOWN = 24  # issues on a contact sheet
_TILE, _GAP, _LINE = 144, 12, 16  # pixels of an image, between two, and of a line of text
_COLUMNS = 6  # images in a row
_MAX_LENGTH = 24  # characters of a line
_ORDER = ("train", "validation", "test")  # order of the splits: an image that is also in a later split is a leak
_FOLDS, _PARTITIONS = 5, 3
_L2 = (1.0, 0.1, 0.01, 0.001)  # regularizations to choose from, by the held-out log-likelihood
_RATIO = 0.5  # largest ratio of the label's probability to the best class's at which the label counts as wrong
_LONGER_SIDE = 256  # pixels of the longer side at which sharpness is measured
_DARK = 0.32  # brightness of the lightest hundredth of a dark image, as in cleanvision
_BLURRED = 0.25  # sharpness of a blurred image, as a share of the median
_TINY = 0.25  # shorter side of a tiny image, as a share of the median
_ODD, _ODDER = 3.0, 2.0  # longer side by shorter side of an odd shape, itself and by the median
_NEIGHBORS = 10
_FAR = 3.0  # interquartile ranges above the third quartile


class Measures(NamedTuple):
    """Measures of a readable image.

    Args:
        digest: SHA-256 of the file.
        width, height: in pixels.
        brightness: of the lightest hundredth of the pixels, from 0 to 1.
        sharpness: deviation of the Laplacian by the deviation of the gray levels.
        picture: (SIDE, SIDE) gray levels of the whole image.
    """

    digest: str
    width: int
    height: int
    brightness: float
    sharpness: float
    picture: np.ndarray

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


class AuditedSplit(NamedTuple):
    """A split of the dataset, or of the other dataset, whose images have no labels, and no issues themselves."""

    name: str
    split: Split
    images: list[str]  # their names, as in issues.csv


class AuditedImage(NamedTuple):
    """A readable image."""

    name: str  # as in issues.csv
    group: int  # number of its split, in the order of training, validation, test, and the other dataset
    split: Split
    row: int  # in the split
    number: int  # of its class; -1 without a label
    label: str  # name of its class
    measures: Measures
    features: torch.Tensor  # (features,) of the model

    @property
    def file(self) -> dict[str, Any]:
        """The undecoded image, {"bytes", "path"}."""
        return self.split.image(self.split.samples[self.row], self.row)


def audit(
    model: str | os.PathLike[str],
    dataset: str | os.PathLike[str],
    train: str | os.PathLike[str] | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> list[Issue]:
    """Find probable label errors, duplicates, leaks, outliers and poor images of a dataset, as `hf-vit audit` does.

    Args:
        model: name on the Hub, or a folder; its features are compared, and it is not trained.
        dataset: a folder with a folder of images for each class, a name on the Hub, or parquet files.
        train: another dataset, on which the model is trained; its images in `dataset` are leaks.
        output_dir: folder of issues.csv, audit.html and contact sheets; None: nothing is written.
        settings: other fields of `AuditSettings`, such as `splits=["train"]`; `hf-vit audit --help` explains each.

    Returns:
        The rows of issues.csv: image, issue, score, label, suggested, other.

    Raises:
        ValueError: a setting is unknown or wrong, fewer than 2 images can be read, or images have no label, several, or
            all the same.

    Example:
        >>> for issue in hf_vit.audit("ti16", "photographs", output_dir="audit"):
        ...     print(issue.image, issue.issue, issue.suggested)
    """
    check_name(model)
    settings |= {"model": str(model), "dataset": str(dataset), "train": None if train is None else str(train)}
    settings["output_dir"] = None if output_dir is None else str(output_dir)
    chosen = build_settings(AuditSettings, settings)
    return run_audit(chosen, start_accelerator(chosen))


def run_audit(settings: AuditSettings, accelerator: Accelerator) -> list[Issue]:
    """Audit the dataset of the settings; write the results to `output_dir`, and return the issues."""
    if settings.output_dir:
        refuse_existing(Path(settings.output_dir) / "issues.csv", settings.overwrite)  # it may have been edited by hand
    splits = open_audited(settings)
    first = splits[0].split  # the other splits are numbered like it
    classes = first.label_names or [f"class {index}" for index in range(first.num_labels)]
    shared = {field.name for field in fields(EvaluateSettings)} & {field.name for field in fields(AuditSettings)}
    extractor = Extractor(EvaluateSettings(**{name: getattr(settings, name) for name in shared}), accelerator)
    images: list[AuditedImage] = []
    by_name: dict[str, AuditedImage] = {}
    unreadable: list[Issue] = []
    count = 0  # of the images that are audited, without the training images of another dataset
    for group, audited in enumerate(splits):
        found = read_images(audited, group, classes, extractor, settings)
        images += found
        by_name |= {image.name: image for image in found}
        if audited.split.label_column is not None:
            count += len(found)
            unreadable += [Issue(name, "unreadable", 1.0) for name in audited.images if name not in by_name]
    if count < 2:
        raise ValueError(f"cannot audit {settings.dataset}: {count} of its images can be read (expected 2 or more)")
    issues = find_issues(images, classes) + unreadable
    if settings.output_dir and accelerator.is_main_process:
        output = Path(settings.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        write_issues(issues, output / "issues.csv")
        write_pages(output, issues, by_name, str(settings.dataset))
    return issues


def open_audited(settings: AuditSettings) -> list[AuditedSplit]:
    """Open the splits of the dataset, with the same class indices, and the training images of the other dataset.

    Raises:
        ValueError: images have no label or several, or all have the same.
    """
    source = source_of(settings)
    names = settings.splits or sorted(source.names, key=_rank)
    raw = replace(settings, exclude=None, relabel=None)
    opened = [AuditedSplit(name, *clean(open_named(raw, name, source=source), settings, name)) for name in names]
    opened = [part for audited in opened for part in _divide_as_recorded(audited, str(settings.model))]
    names = [audited.name for audited in opened]
    log_splits(source, {audited.name: audited.split for audited in opened})
    if settings.output_dir is not None:
        write_unused(Path(settings.output_dir), source.unused)
    for audited in opened:
        require_labels(audited.split, audited.name)
        audited.split.class_numbers("an audit")
    first = opened[0].split
    if not any(audited.split.label_names for audited in opened):
        first = replace(first, num_labels=max(audited.split.num_labels for audited in opened))
    splits = []
    classes = set()
    for audited in opened:
        split = match_to_split(first, audited.split, names[0], audited.name)
        splits.append(audited._replace(split=split))
        classes.update(split.class_numbers().tolist())
    if len(classes) == 1:
        require_labels(first, " and ".join(names), two_classes=True)
    if settings.train not in (None, settings.dataset):
        splits += _open_training(settings.train, raw)
    return splits


def _open_training(dataset: str, settings: AuditSettings) -> list[AuditedSplit]:
    """Open the training images of another dataset, without labels; all its images if it has no training split."""
    names = names_of_splits(dataset)
    if "train" in names:
        names = ["train"]
    no_labels = dict.fromkeys(("label_column", "label_names", "num_labels"))
    unlabeled = replace(settings, dataset=dataset, dataset_config=None, layout=None, **no_labels)
    splits = []
    for name in names:
        split = open_named(unlabeled, name, needs_labels=False)
        images = [str(Path(dataset, image)) for image in name_images(split, unlabeled, name)]
        splits.append(AuditedSplit(name, split, images))
    return splits


def _divide_as_recorded(audited: AuditedSplit, model: str) -> list[AuditedSplit]:
    """Divide the training split of the model into the images that its training used and those that it held out.

    An image of both is a leak. Other splits, and images that have changed since, stay as they are.
    """
    name, split, images = audited
    record = read_record(model) or {}
    if name != record.get("train_split") or not is_divided(record):
        return [audited]
    rows = rows_held_out(split, record)
    if rows is None:
        return [audited]
    train, held_out = divide(split, rows)
    if fingerprint_data(train) != record.get("fingerprint"):
        return [audited]
    held_out_images = [images[row] for row in rows]
    train_images = [images[row] for row in np.setdiff1d(np.arange(len(images)), rows)]
    return [
        AuditedSplit(name, train, train_images),
        AuditedSplit(f"held-out images of {name}", held_out, held_out_images),
    ]


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def read_images(
    audited: AuditedSplit, group: int, classes: Sequence[str], extractor: Extractor, settings: AuditSettings
) -> list[AuditedImage]:
    """Measure the images of a split, and compute their features; unreadable ones are left out."""
    _, split, names = audited
    found = extractor.extract(split, audited.name)
    by_row = dict(zip(found.index.tolist(), zip(found.labels.tolist(), found.values, strict=True), strict=True))
    num_channels, num_threads = extractor.config.num_channels, count_workers(settings.num_workers)
    images = []
    for row, measures in enumerate(measure_split(split, num_channels, num_threads)):
        if measures is not None and row in by_row:
            number, features = by_row[row]
            label = str(classes[number]) if number >= 0 else ""
            images.append(AuditedImage(names[row], group, split, row, number, label, measures, features))
    return images


def find_issues(images: Sequence[AuditedImage], classes: Sequence[str]) -> list[Issue]:
    """Return the issues of the images, sorted by kind, the clearest first; `classes` are the names of the classes."""
    own = [image for image in images if image.number >= 0]
    features, labels = torch.stack([image.features for image in own]), torch.tensor([image.number for image in own])
    errors, probabilities = find_label_errors(features, labels, len(classes))
    issues = find_repeated(images)
    for row in errors:
        image, chances = own[row], probabilities[row]
        best = int(chances.argmax())
        score = float(chances[best] - chances[image.number])
        issues.append(Issue(image.name, "label_error", score, image.label, classes[best]))
    poor = find_poor_images([image.measures for image in own]) | {"outlier": find_outliers(features)}
    for kind, (has_issue, scores) in poor.items():
        for row in np.flatnonzero(has_issue):
            issues.append(Issue(own[row].name, kind, float(scores[row]), own[row].label))
    return sorted(issues, key=lambda issue: (list(_KINDS).index(issue.issue), -issue.score))


def find_repeated(images: Sequence[AuditedImage]) -> list[Issue]:
    """Return leaks, and exact and near duplicates within a split; the copy with the most pixels is not an issue."""
    pictures = torch.from_numpy(np.stack([image.measures.picture for image in images]))
    pairs = find_near_duplicates(torch.stack([image.features for image in images]), pictures)
    for pair in _same_files(images):
        pairs[pair] = 1.0
    scores = pairs | {(second, first): score for (first, second), score in pairs.items()}
    best: dict[int, float] = {}
    for (row, _), score in scores.items():
        best[row] = max(best.get(row, 0.0), score)
    issues = []
    for rows in group_rows(pairs, len(images)):
        by_pixels = sorted(reversed(rows), key=lambda row: images[row].measures.num_pixels)
        largest = {images[row].group: row for row in by_pixels}  # split -> row of its image with the most pixels
        for row in rows:
            image = images[row]
            later = [other for other in rows if images[other].group > image.group]
            if later:
                kind = "leak"
                other = max(later, key=lambda other: scores.get((row, other), 0.0))
            else:
                other = largest[image.group]
                is_exact = image.measures.digest == images[other].measures.digest
                kind = "exact_duplicate" if is_exact else "near_duplicate"
            if other != row and image.number >= 0:
                score = scores.get((row, other), best[row])
                issues.append(Issue(image.name, kind, score, image.label, other=images[other].name))
    return issues


def _same_files(images: Sequence[AuditedImage]) -> Iterator[tuple[int, int]]:
    """Yield (first row, another row) of images whose files are equal."""
    first_rows: dict[str, int] = {}
    for row, image in enumerate(images):
        first = first_rows.setdefault(image.measures.digest, row)
        if first != row:
            yield first, row


def group_rows(pairs: Iterable[tuple[int, int]], count: int) -> list[list[int]]:
    """Group `count` rows, so that the two of each pair are in one group."""
    parents = list(range(count))

    def root_of(row: int) -> int:
        while parents[row] != row:
            parents[row] = parents[parents[row]]
            row = parents[row]
        return row

    for first, second in pairs:
        parents[root_of(second)] = root_of(first)
    groups = defaultdict(list)
    for row in range(count):
        groups[root_of(row)].append(row)
    return list(groups.values())


def find_label_errors(features: torch.Tensor, labels: torch.Tensor, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Find images whose label is probably wrong.

    The only image of a class is never one of them, because a probe without it cannot predict its class.

    Args:
        features: (images, features)
        labels: (images,) class indices

    Returns:
        Rows of the probable errors, and the probabilities (images, classes) out of sample.
    """
    partitions = [torch.from_numpy(assign_folds(labels.numpy(), _FOLDS, seed)) for seed in range(_PARTITIONS)]
    logs = torch.stack([cross_validate(features, labels, num_classes, folds) for folds in partitions])
    probabilities = logs.mean(dim=0).softmax(dim=1)
    own = probabilities.gather(1, labels[:, None]).squeeze(1)
    counts = labels.bincount(minlength=num_classes)
    errors = (own < _RATIO * probabilities.amax(dim=1)) & (counts[labels] > 1)
    return errors.nonzero().flatten().numpy(), probabilities.numpy()


def cross_validate(features: torch.Tensor, labels: torch.Tensor, num_classes: int, folds: torch.Tensor) -> torch.Tensor:
    """Predict each fold by a probe of the other folds: (images, classes) log-probabilities."""
    results = torch.empty(len(_L2), len(labels), num_classes)
    for fold in folds.unique():
        held_out = folds == fold
        regression = LogisticRegression(features[~held_out], num_classes)
        for number, l2 in enumerate(_L2):  # each fit starts from the one before
            regression.fit(features[~held_out], labels[~held_out], l2, max_steps=100)
            results[number, held_out] = regression.logits(features[held_out]).log_softmax(dim=1)
    losses = torch.stack([F.nll_loss(values, labels) for values in results])
    return results[int(losses.argmin())]


def measure_split(split: Split, num_channels: int, num_threads: int) -> Iterator[Measures | None]:
    """Yield the measures of each image of a split, in order; None for an unreadable one."""

    def measure_row(row: int) -> Measures | None:
        file = split.image(split.samples[row], row)
        try:
            content = file["bytes"] if file["bytes"] is not None else Path(file["path"]).read_bytes()
            return measure(content, num_channels)
        except (ImageReadingError, OSError):
            return None

    with ThreadPoolExecutor(max(num_threads, 1)) as pool:
        yield from pool.map(measure_row, range(len(split)))


def measure(content: bytes, num_channels: int = 3) -> Measures:
    """Measure the image of a file's content; with other channels than color, their mean is the gray level."""
    gray_from = 1 if num_channels == 3 else num_channels
    image = read_image(content, gray_from)
    levels = image.float().mean(dim=0)
    height, width = levels.shape if is_npy(content) else read_size(content)
    image = Image.fromarray(levels.byte().numpy())
    picture = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    image.thumbnail((_LONGER_SIDE, _LONGER_SIDE), Image.Resampling.BOX)
    gray = np.asarray(image, np.float32)
    padded = np.pad(gray, 1, "edge")
    laplacian = 4 * gray - padded[:-2, 1:-1] - padded[2:, 1:-1] - padded[1:-1, :-2] - padded[1:-1, 2:]
    sharpness = laplacian.std() / max(gray.std(), 1)
    brightness = np.percentile(gray, 99) / 255
    return Measures(hashlib.sha256(content).hexdigest(), width, height, float(brightness), float(sharpness), picture)


def find_poor_images(measures: list[Measures]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return for each kind of issue whether each image has it, and its score from 0 to 1."""
    brightness, sharpness = np.array([[one.brightness, one.sharpness] for one in measures]).T
    sides = np.array([[one.width, one.height] for one in measures], np.float64)
    shorter, shape = sides.min(axis=1), sides.max(axis=1) / sides.min(axis=1)
    sizes = shorter / np.median(shorter)
    relative = sharpness / max(float(np.median(sharpness)), 1e-6)
    is_odd = (shape > _ODD) & (shape > _ODDER * np.median(shape))
    return {
        "dark": (brightness < _DARK, 1 - brightness),
        "blurred": (relative < _BLURRED, 1 - relative),
        "tiny": (sizes < _TINY, 1 - sizes),
        "odd_shape": (is_odd, 1 - 1 / shape),
    }


def find_outliers(features: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each image is far from all others, and its mean cosine distance to the nearest ten."""
    vectors = F.normalize(features.float(), dim=1)
    distances = 1 - nearest_neighbors(vectors, vectors, _NEIGHBORS)[0].mean(dim=1).numpy()
    low, high = np.percentile(distances, [25, 75])
    return distances > high + _FAR * (high - low), distances


def write_pages(output: Path, issues: Sequence[Issue], images: Mapping[str, AuditedImage], dataset: str) -> None:
    """Write a contact sheet for each kind, KIND.png, and audit.html.

    Args:
        images: the images that can be read, by name.
        dataset: name of the dataset.
    """
    sections = []
    for kind, (title, about) in _KINDS.items():
        found = [issue for issue in issues if issue.issue == kind]
        if not found:
            continue
        shown, picture = found[:_SHOWN], ""
        if kind != "unreadable":
            path = output / f"{kind}.png"
            with own_file(path) as file:
                draw_sheet(shown, images).save(file, "PNG")
            picture = data_uri("png", path.read_bytes())
        sections.append({"title": title, "about": about, "picture": picture, "issues": found, "shown": shown})
    page = render_page("hf_vit.auditing", "page.html.jinja", dataset=dataset, sections=sections, images=len(images))
    write_text(output / "audit.html", page)


def draw_sheet(issues: Sequence[Issue], images: Mapping[str, AuditedImage]) -> Image.Image:
    """Draw the images of issues with their names and labels; the image that one repeats is next to it."""
    from matplotlib.font_manager import findfont  # slow to import

    tiles = 2 if any(issue.other for issue in issues) else 1
    columns = min(_COLUMNS // tiles, len(issues))
    width, height = tiles * (_TILE + 2) + _GAP, _TILE + 3 * _LINE + _GAP
    size = columns * width + _GAP, -(-len(issues) // columns) * height + _GAP
    sheet = Image.new("RGB", size, page_color("paper"))
    draw, font = ImageDraw.Draw(sheet), ImageFont.truetype(findfont("DejaVu Sans"), 10)
    for number, issue in enumerate(issues):
        left, top = number % columns * width + _GAP, number // columns * height + _GAP
        for column, name in enumerate((issue.image, issue.other)[:tiles]):
            x = left + column * (_TILE + 2)
            if name in images:
                with suppress(ImageReadingError):
                    sheet.paste(_thumbnail(images[name].file), (x, top))
            draw.text((x, top + _TILE + 2), name[-_MAX_LENGTH:], page_color("ink"), font)
        lines = issue.label, f"-> {issue.suggested}" if issue.suggested else f"{issue.score:.3f}"
        text = "\n".join(line[:_MAX_LENGTH] for line in lines)
        draw.multiline_text((left, top + _TILE + 2 + _LINE), text, page_color("ink"), font)
    return sheet


def _thumbnail(file: dict[str, Any]) -> Image.Image:
    """Read an image as a tile, with its aspect ratio; small images are enlarged without smoothing."""
    image = read_for_display(file, _TILE)
    scale = _TILE / max(image.size)
    size = max(round(image.width * scale), 1), max(round(image.height * scale), 1)
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX)
