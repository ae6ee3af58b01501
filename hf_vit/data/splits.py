"""A split of a dataset: undecoded images, the meaning of their labels, and the images held out for evaluation."""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from ..files.addresses import redact_secrets
from ..files.messages import join_names, shorten
from ..models.image_reading import ImageReadingError
from ..models.sizes import MAX_LABELS
from ..settings.fields import AUTO, REGRESSION_LOSSES, DataSettings, TrainingSettings
from .columns import find_column, find_label_column, is_image, is_list_of, is_text, no_classes
from .issues import clean
from .labels import match_to_split, require_labels, state_classes
from .layout import EVALUATION_SPLITS, resolve_split, split_named
from .shards import Columns, ShardedDataset, open_index, plan_blocks, stored_class_names
from .sources import Source, open_source
from .summary import log_classes_without_evaluation, log_holdout, log_splits
from .targets import find_target_columns, read_targets

SKIPPED_IMAGES = "skipped_images.txt"  # file of an output folder: a line for each unreadable image
_ROWS_AT_ONCE = 1000
_MOST_LOGGED = 10  # unreadable images that are logged by name
_FEWEST = 10  # smallest training split from which images are held out

logger = logging.getLogger(__name__)


@dataclass
class Split:
    """A split of a dataset, with undecoded images, and the meaning of its labels."""

    samples: Any  # datasets.Dataset or ShardedDataset
    image_column: str
    label_column: str | None
    label_names: list[str] | None
    num_labels: int
    multi_label: bool = False
    targets: list[str] = field(default_factory=list)  # columns of numbers, of a regression; then there are no labels
    numbers: list[int] | None = None  # the data's class index -> the one to use; None: the same
    are_counted: bool = False  # the classes are the values of a column, not stated by the data or an option
    unused: dict[str, list[str]] = field(default_factory=dict)  # names of what is not used of the data, by reason
    skipped_file: Path | None = None  # list of the unreadable images
    _skipped: set[str] = field(default_factory=set)  # unreadable images that this process has met

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def is_sharded(self) -> bool:
        """Return whether the images are in shards, whose labels are not read in advance."""
        return isinstance(self.samples, ShardedDataset)

    @property
    def in_blocks(self) -> bool:
        """Return whether the images are in shards that are read in blocks of rows."""
        return self.is_sharded and self.samples.holds_blocks

    @property
    def needs_spawn(self) -> bool:
        """Return whether threads of this process have connections, which a fork would break."""
        return self.is_sharded and self.samples.uses_event_loop

    def image(self, sample: dict, row: int) -> dict[str, Any]:
        """Return a sample's undecoded image, {"bytes", "path"}; the path is its name in messages."""
        image = sample[self.image_column] or {"bytes": None, "path": None}
        if image["path"] is None:
            return {"bytes": image["bytes"] or b"", "path": f"row {row}"}
        return image

    def paths(self) -> list[tuple[str | None, bool]]:
        """Return for each image its path, if it has one, and whether it is a file; the bytes of others are not read."""
        if self.is_sharded:
            return [(None, False)] * len(self)
        found, columns = [], self.samples.select_columns(self.image_column).with_format("arrow")
        for batch in columns.iter(_ROWS_AT_ONCE):
            images = batch[self.image_column].combine_chunks()
            found += zip(images.field("path").to_pylist(), images.field("bytes").is_null().to_pylist(), strict=True)
        return found

    def log_unreadable(self, error: ImageReadingError) -> None:
        """Add an unreadable image to `skipped_file`, in which each comes once, and log the first ones."""
        message = " ".join(str(error).split())
        if message in self._skipped:
            return
        self._skipped.add(message)
        number = len(self._skipped)
        if self.skipped_file is not None:
            self.skipped_file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.skipped_file, "a+", encoding="utf-8", errors="backslashreplace") as file:
                file.seek(0)
                lines = file.read().splitlines()  # other processes write to it, too
                if message in lines:
                    return
                file.write(f"{message}\n")
            number = len(lines) + 1
        if number <= _MOST_LOGGED:
            logger.warning(f"skipped: {message}")

    def label(self, sample: dict) -> Any:
        """Return a sample's class index; -1 without a label; indicators (num_labels,) if it may have several.

        Of a regression, it is the targets, (num_labels,).
        """
        if self.targets:
            return np.array([float(sample[column]) for column in self.targets], np.float32)
        if self.label_column is None:
            return -1
        label = sample[self.label_column]
        if not self.multi_label:
            return -1 if label is None else self._renumber(label)
        indicators = np.zeros(self.num_labels, np.float32)
        indicators[[self._renumber(number) for number in label]] = 1
        return indicators

    def target_values(self) -> np.ndarray:
        """Return the targets of all images, (images, num_labels) float64; see `read_targets`."""
        return read_targets(self.samples, self.targets, self.image_column)

    def label_counts(self) -> Counter[tuple[int, ...]]:
        """Count the images with each combination of class indices; (-1,) are images without a label."""
        assert self.label_column is not None
        if not self.multi_label:
            return Counter({(number,): count for number, count in Counter(self.class_numbers().tolist()).items()})
        lists = _read_column(self.samples, self.label_column).to_pylist()
        return Counter((-1,) if numbers is None else tuple(map(self._renumber, numbers)) for numbers in lists)

    def classes_with_images(self) -> list[int]:
        """Return the numbers of the classes that occur, in order; of shards, which are not read, all numbers."""
        if self.label_column is None:
            return []
        if self.is_sharded:
            return list(range(self.num_labels))
        return sorted({number for numbers in self.label_counts() for number in numbers if number >= 0})

    def class_numbers(self, purpose: str = "the command") -> np.ndarray:
        """Return the class index of each image, (images,); -1 for no label.

        Args:
            purpose: the setting that needs them, for errors.

        Raises:
            ValueError: images have no labels, or several, or are in shards.
        """
        if self.multi_label or self.label_column is None or self.is_sharded:
            raise ValueError(f"{purpose}, which needs one label of each image, and does not work with shards")
        labels = _read_column(self.samples, self.label_column).fill_null(-1).to_pylist()
        return np.array([self._renumber(label) for label in labels], np.int64)

    def class_indices(self) -> list[int]:
        """Return the numbers of the classes that have images, sorted."""
        return sorted({number for numbers in self.label_counts() for number in numbers if number >= 0})

    def _renumber(self, label: int) -> int:
        return label if self.numbers is None or label < 0 else self.numbers[label]


def open_split(
    samples: Any,
    image_column: str | None = None,
    label_column: str | None = None,
    needs_labels: bool = True,
    counts_labels: bool = True,
    shuffle_buffer: int | None = None,
) -> Split:
    """Open a split: find the columns of images and labels, and read the class names.

    Args:
        samples: a `datasets.Dataset`, or the names of shards, which are indexed.
        counts_labels: count the classes of shards without class names by reading all labels.
        shuffle_buffer: number of rows of shards that are shuffled together.

    Raises:
        ValueError: not exactly one column fits; the message lists the columns.
    """
    given_column, are_counted = label_column, False
    if isinstance(samples, list):
        index = open_index(samples, Columns(image_column, label_column, needs_labels, counts_labels))
        samples = ShardedDataset(index, plan_blocks(index, shuffle_buffer))
        image_column, label_column = index.image_column, index.label_column
        are_counted = index.are_counted
    else:
        image_column = find_column(samples.features, image_column, is_image, "image")
        try:
            samples = samples.cast_column(image_column, datasets.Image(decode=False))
        except (pa.ArrowException, TypeError) as error:
            raise ValueError(
                f"the column {image_column} has no images; name another one with --image-column"
            ) from error
        if needs_labels or label_column is not None:
            label_column = find_label_column(samples.features, label_column)
            are_counted = not _states_classes(samples.features[label_column])
            samples = _encode_names(samples, label_column, needs_labels)
    if label_column is None:
        return Split(samples, image_column, None, None, 0)
    are_counted = are_counted and given_column is None
    feature = samples.features[label_column]
    if multi_label := is_list_of(feature, datasets.ClassLabel):
        feature = feature.feature
    if isinstance(feature, datasets.ClassLabel):
        names = list(feature.names or [])
        return Split(samples, image_column, label_column, names, len(names), multi_label, are_counted=are_counted)
    if not isinstance(samples, ShardedDataset):
        num_labels = max(_read_column(samples, label_column).drop_null().to_pylist(), default=-1) + 1
    elif is_list_of(feature, datasets.Value):
        raise ValueError(f"the column {label_column} has lists without class names; load it without streaming")
    else:
        num_labels = samples.index.num_labels or 0
    _check_count(num_labels, label_column)
    return Split(samples, image_column, label_column, None, num_labels, are_counted=are_counted)


def _states_classes(feature: Any) -> bool:
    """Return whether a column states its classes, which are not only its values."""
    return isinstance(feature, datasets.ClassLabel) or is_list_of(feature, datasets.ClassLabel)


def _encode_names(samples: datasets.Dataset, column: str, needs_labels: bool) -> datasets.Dataset:
    """Turn labels that are text, or lists without class names, into classes."""
    if needs_labels and samples.data.column(column).null_count == len(samples) > 0:
        raise no_classes(samples.features)  # `datasets` reads a single folder of images so
    if is_text(samples.features[column]):
        return samples.class_encode_column(column)
    if is_list_of(samples.features[column], datasets.Value):
        return _encode_lists(samples, column)
    return samples


def _encode_lists(samples: datasets.Dataset, column: str) -> datasets.Dataset:
    """Turn lists of class names, or of class indices, into lists of classes."""
    lists = _read_column(samples, column).to_pylist()
    found = {label for labels in lists for label in labels or []}
    are_numbers = all(isinstance(label, int) for label in found)
    if not found or None in found or (are_numbers and min(found) < 0):
        raise ValueError(f"the column {column} has the labels {shorten(found)} (expected names, or numbers from 0)")
    if are_numbers:
        _check_count(max(found) + 1, column)
        names = [f"LABEL_{number}" for number in range(max(found) + 1)]
    else:
        names = sorted(found)
        numbers = {name: number for number, name in enumerate(names)}
        lists = [None if labels is None else [numbers[label] for label in labels] for labels in lists]
    feature = datasets.List(datasets.ClassLabel(names=names))
    return samples.remove_columns(column).add_column(column, lists, feature=feature)  # pyright: ignore


def _check_count(count: int, column: str) -> None:
    """Raise ValueError if a column of class indices has too many classes."""
    if count > MAX_LABELS:
        raise ValueError(f"the column {column} has {count:,} classes (expected {MAX_LABELS:,} at most)")


def _read_column(samples: datasets.Dataset, column: str) -> pa.ChunkedArray:
    return samples.select_columns([column]).with_format("arrow")[:][column]


def source_of(settings: DataSettings) -> Source:
    """Find the splits of the settings' dataset."""
    return open_source(str(settings.dataset), settings.dataset_config, settings.layout, settings.label_column)


def open_named(
    settings: DataSettings,
    name: str,
    needs_labels: bool = True,
    source: Source | None = None,
    targets: Sequence[str] | None = None,
) -> Split:
    """Open the split of the settings' dataset that has this name, or a slice of it.

    Args:
        source: the dataset, if it was opened before.
        targets: columns of numbers, of a regression; None: as the task of the settings says.

    Raises:
        ValueError: there is no such split, or it cannot be read; or a slice of a folder lacks a class.
    """
    source = source or source_of(settings)
    samples = source.load(name, settings.streaming)
    are_stated = settings.num_labels is not None or settings.label_names is not None
    try:
        if targets is None and needs_labels and isinstance(settings, TrainingSettings):
            targets = _find_targets(samples, settings)
        if targets:
            split = _open_targets(samples, settings, list(targets))
        else:
            buffer = settings.shuffle_buffer if isinstance(settings, TrainingSettings) else None
            columns = settings.image_column, settings.label_column
            split = open_split(samples, *columns, needs_labels, not are_stated, buffer)
    except ValueError as error:
        raise ValueError(f"{redact_secrets(source.name)}, {name}: {error}") from error
    if split.label_column is not None and split.label_names is None and not split.is_sharded:
        split = _name_classes_of_tars(split, settings, name, source)
    if source.is_folder and "[" in name and split.label_column is not None:
        _refuse_partial_slice(split, settings, name, source)
    split.unused = source.unused
    if settings.exclude or settings.relabel:
        split, _ = clean(split, settings, name)
    split.skipped_file = None if settings.output_dir is None else Path(settings.output_dir) / SKIPPED_IMAGES
    return state_classes(split, settings.num_labels, settings.label_names) if are_stated else split


def _find_targets(samples: Any, settings: TrainingSettings) -> list[str]:
    """Return the columns of the targets; none for a classification. Shards are for classification."""
    if not isinstance(samples, list):
        return find_target_columns(samples, settings.label_column, settings.task)
    if settings.task == "regression":
        raise ValueError("task is regression, which does not work with images in shards")
    return []


def _open_targets(samples: Any, settings: DataSettings, targets: list[str]) -> Split:
    """Open a split whose labels are columns of numbers.

    Raises:
        ValueError: a value is no finite number.
    """
    split = open_split(samples, settings.image_column, needs_labels=False)
    split = dataclasses.replace(split, targets=targets, label_names=targets, num_labels=len(targets))
    split.target_values()
    return split


def _refuse_partial_slice(split: Split, settings: DataSettings, name: str, source: Source) -> None:
    """Raise ValueError if a slice of a folder, whose rows are sorted, lacks a class of the whole."""
    whole_name = "+".join(dict.fromkeys(part.partition("[")[0].strip() for part in name.split("+")))
    whole = open_split(source.load(whole_name), settings.image_column, settings.label_column)
    classes = whole.label_names or [f"class {number}" for number in range(whole.num_labels)]
    had, has = ({classes[number] for number in one.class_indices()} for one in (whole, split))
    if missing := sorted(had - has):
        raise ValueError(
            f"{name} of {source.name} lacks {len(missing)} of its {len(had)} classes ({join_names(missing, 3)}), "
            "because the images of a folder are sorted: use whole splits, and hold out a share of each class with "
            "--eval-split auto --eval-fraction 0.1"
        )


def _name_classes_of_tars(split: Split, settings: DataSettings, name: str, source: Source) -> Split:
    """Name the classes of local tars, which have only numbers, as the index of `hf-vit shard` does."""
    path = Path(str(settings.dataset)).expanduser()
    if split.samples.info.builder_name != "webdataset" or not (path.is_dir() or path.suffix == ".tar"):
        return split
    files = source.load(re.split(r"[\[+]", name)[0], streaming=True)
    names = stored_class_names(files, Columns(settings.image_column, settings.label_column))
    return split if names is None else dataclasses.replace(split, label_names=names, num_labels=len(names))


def open_splits(
    settings: TrainingSettings, needs_labels: bool = True, two_classes: bool = True
) -> tuple[Split, Split | None]:
    """Open the training and the evaluation split, with the same class indices.

    Where the evaluation split is "auto" and the data have such a split, the setting becomes its name; where the loss is
    "auto", it becomes the one of the labels.

    Args:
        two_classes: refuse training images that all have the same label.

    Raises:
        ValueError: the classes differ, or images have no labels.
    """
    source = source_of(settings)
    split = open_named(settings, settings.train_split, needs_labels, source)
    if needs_labels:
        require_labels(split, settings.train_split, two_classes)
    _resolve_task(settings, split)
    if settings.eval_split == AUTO:
        settings.eval_split = find_eval_split(source, settings.train_split)
    used = {settings.train_split: split}
    eval_split = None
    if settings.eval_split == AUTO:
        split, eval_split = split_off_holdout(split, settings.eval_fraction)
    elif settings.eval_split is not None:
        eval_split = open_named(settings, settings.eval_split, needs_labels, source, split.targets)
        require_labels(eval_split, settings.eval_split)
        eval_split = match_to_split(split, eval_split, settings.train_split, settings.eval_split)
        used[settings.eval_split] = eval_split
    log_splits(source, used)
    if settings.eval_split == AUTO:
        log_holdout(eval_split, settings.eval_fraction)
    log_classes_without_evaluation(split, eval_split)
    return split, eval_split


def _resolve_task(settings: TrainingSettings, split: Split) -> None:
    """Set the task and the loss to those of the labels, where the user left them open.

    Raises:
        ValueError: the labels are of another kind than the task or the loss.
    """
    if split.multi_label and settings.task == "single-label":
        raise ValueError(f"task is single-label, but images of {settings.dataset} have several labels")
    if split.targets:
        settings.task = "regression"
        settings.check_regression()
        loss = "mse"
    elif settings.loss in REGRESSION_LOSSES:
        raise ValueError(f"loss is {settings.loss}, but {settings.dataset} has classes: numbers need --task regression")
    else:
        has_several = split.multi_label or settings.task == "multi-label"
        loss = "sigmoid" if has_several else "softmax"
    if settings.loss == AUTO:
        settings.loss = loss


def find_eval_split(source: Source, train_split: str) -> str:
    """Return the name of the split to evaluate on; "auto" if only the training split exists."""
    trained_on = {part.partition("[")[0].strip() for part in source.resolve(train_split).split("+")}
    for meaning in EVALUATION_SPLITS:
        names = [name for name in source.names if split_named(name) == meaning and name not in trained_on]
        if names:
            return resolve_split(meaning, names)
    return AUTO


def split_off_holdout(split: Split, fraction: float = 0.1) -> tuple[Split, Split | None]:
    """Divide a split into training images and a held-out share of each class, drawn with a fixed seed.

    At least one image of each class that has two is held out. Nothing is held out of shards and of fewer than 10
    images.
    """
    held_out = rows_to_hold_out(split, fraction)
    return (split, None) if held_out is None else divide(split, held_out)


def rows_to_hold_out(split: Split, fraction: float) -> np.ndarray | None:
    """Return the rows that `split_off_holdout` holds out, in order; None if it holds out nothing."""
    if split.is_sharded or len(split) < _FEWEST:
        return None
    classes = _classes_to_divide(split, "a held-out share of each class")
    drawn = np.random.default_rng(0).permutation(len(split))
    held_out = []
    for number in np.unique(classes):
        rows = drawn[classes[drawn] == number]
        count = max(round(fraction * len(rows)), 1) if len(rows) > 1 else 0
        held_out.append(rows[: min(count, len(rows) - 1)])
    held_out = np.concatenate(held_out)
    if not len(held_out):
        held_out = drawn[:1]  # at least one image
    return np.sort(held_out)


def divide(split: Split, held_out: np.ndarray) -> tuple[Split, Split]:
    """Divide a split into the rows that are not held out, and those that are."""
    return _select(split, np.setdiff1d(np.arange(len(split)), held_out)), _select(split, held_out)


def split_into_folds(split: Split, folds: int) -> list[tuple[Split, Split]]:
    """Return the training images and the held-out images of each fold; every image is held out once.

    Raises:
        ValueError: as in `rows_of_folds`.
    """
    return [divide(split, held_out) for held_out in rows_of_folds(split, folds)]


def rows_of_folds(split: Split, folds: int) -> list[np.ndarray]:
    """Return the rows that each fold holds out, in order.

    The images of each class are shuffled with a fixed seed and dealt to the folds in turn.

    Raises:
        ValueError: the images are in shards, or a class has fewer images than there are folds.
    """
    classes = _classes_to_divide(split, f"folds is {folds}")
    if (fewest := np.unique(classes, return_counts=True)[1].min()) < folds:
        raise ValueError(f"folds is {folds}, but a class has {fewest} images (expected one for each fold)")
    numbers = assign_folds(classes, folds)
    return [np.flatnonzero(numbers == fold) for fold in range(folds)]


def assign_folds(classes: np.ndarray, folds: int, seed: int = 0) -> np.ndarray:
    """Deal the shuffled images of each class to the folds in turn: (images,) fold numbers."""
    drawn = np.random.default_rng(seed).permutation(len(classes))
    numbers = np.empty(len(classes), np.int64)
    numbers[drawn[classes[drawn].argsort(kind="stable")]] = np.arange(len(classes)) % folds
    return numbers


def _classes_to_divide(split: Split, purpose: str) -> np.ndarray:
    """Return the class index of each image; all 0 without one label per image."""
    has_classes = split.label_column is not None and not split.multi_label
    return split.class_numbers(purpose) if has_classes else np.zeros(len(split), np.int64)


def _select(split: Split, rows: np.ndarray) -> Split:
    return dataclasses.replace(split, samples=split.samples.select(rows))
