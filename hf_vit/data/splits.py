"""A split of a data set: undecoded images, the meaning of their labels, and the images held out for evaluation."""

import dataclasses
import logging
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from ..files.messages import shorten
from ..models.configuration_hf_vit import MAX_LABELS
from ..models.image_reading import ImageReadingError
from ..settings.fields import AUTO, DataSettings, TrainingSettings
from .issues import clean
from .labels import match_to_split, require_labels, state_classes
from .shards import Columns, ShardedDataset, open_index, stored_class_names
from .sources import (
    find_column,
    find_label_column,
    is_image,
    is_list_of,
    is_text,
    load_split,
    names_of_splits,
    no_classes,
)

SKIPPED_IMAGES = "skipped_images.txt"  # file of an output folder: a line for each unreadable image
_ROWS_AT_ONCE = 1000
_MOST_LOGGED = 10  # unreadable images that are logged by name
_EVAL_SPLITS = ("validation", "val", "valid", "dev", "test")  # the first existing one is used
_HELD_OUT = 0.1  # share of each class, if there is none of these splits
_FEWEST = 10  # smallest training split from which images are held out

logger = logging.getLogger(__name__)


@dataclass
class Split:
    """A split of a data set, with undecoded images, and the meaning of its labels."""

    samples: Any  # datasets.Dataset or ShardedDataset
    image_column: str
    label_column: str | None
    label_names: list[str] | None
    num_labels: int
    multi_label: bool = False
    numbers: list[int] | None = None  # the data's class number -> the one to use; None: the same
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
        """Return a sample's class number; -1 without a label; indicators (num_labels,) if it may have several."""
        if self.label_column is None:
            return -1
        label = sample[self.label_column]
        if not self.multi_label:
            return -1 if label is None else self._renumber(label)
        indicators = np.zeros(self.num_labels, np.float32)
        indicators[[self._renumber(number) for number in label]] = 1
        return indicators

    def label_counts(self) -> Counter[tuple[int, ...]]:
        """Count the images with each combination of class numbers; (-1,) are images without a label."""
        assert self.label_column is not None
        if not self.multi_label:
            return Counter({(number,): count for number, count in Counter(self.class_numbers().tolist()).items()})
        lists = _read_column(self.samples, self.label_column).to_pylist()
        return Counter((-1,) if numbers is None else tuple(map(self._renumber, numbers)) for numbers in lists)

    def class_numbers(self, purpose: str = "the command") -> np.ndarray:
        """Return the class number of each image, (images,); -1 for no label.

        Args:
            purpose: the setting that needs them, for errors.

        Raises:
            ValueError: images have no labels, or several, or are in shards.
        """
        if self.multi_label or self.label_column is None or self.is_sharded:
            raise ValueError(f"{purpose}, which needs one label of each image, and does not work with shards")
        labels = _read_column(self.samples, self.label_column).fill_null(-1).to_pylist()
        return np.array([self._renumber(label) for label in labels], np.int64)

    def _renumber(self, label: int) -> int:
        return label if self.numbers is None or label < 0 else self.numbers[label]


def open_split(
    samples: Any,
    image_column: str | None = None,
    label_column: str | None = None,
    needs_labels: bool = True,
    counts_labels: bool = True,
    together: int | None = None,
) -> Split:
    """Open a split: find the columns of images and labels, and read the class names.

    Args:
        samples: a `datasets.Dataset`, or the names of shards, which are indexed.
        counts_labels: count the classes of shards without class names by reading all labels.
        together: number of rows of shards that are shuffled together.

    Raises:
        ValueError: not exactly one column fits; the message lists the columns.
    """
    if isinstance(samples, list):
        index = open_index(samples, Columns(image_column, label_column, needs_labels, counts_labels))
        samples = ShardedDataset(index, together)
        image_column, label_column = index.image_column, index.label_column
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
            samples = _encode_names(samples, label_column, needs_labels)
    if label_column is None:
        return Split(samples, image_column, None, None, 0)
    feature = samples.features[label_column]
    if multi_label := is_list_of(feature, datasets.ClassLabel):
        feature = feature.feature
    if isinstance(feature, datasets.ClassLabel):
        names = list(feature.names or [])
        return Split(samples, image_column, label_column, names, len(names), multi_label)
    if not isinstance(samples, ShardedDataset):
        num_labels = max(_read_column(samples, label_column).drop_null().to_pylist(), default=-1) + 1
    elif is_list_of(feature, datasets.Value):
        raise ValueError(f"the column {label_column} has lists without class names; load it without streaming")
    else:
        num_labels = samples.index.num_labels or 0
    _check_count(num_labels, label_column)
    return Split(samples, image_column, label_column, None, num_labels)


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
    """Turn lists of class names, or of class numbers, into lists of classes."""
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
    """Raise ValueError if a column of class numbers has too many classes."""
    if count > MAX_LABELS:
        raise ValueError(f"the column {column} has {count:,} classes (expected {MAX_LABELS:,} at most)")


def _read_column(samples: datasets.Dataset, column: str) -> pa.ChunkedArray:
    return samples.select_columns([column]).with_format("arrow")[:][column]


def open_named(settings: DataSettings, name: str, needs_labels: bool = True) -> Split:
    """Open the split of the settings' data set that has this name."""
    assert settings.dataset
    samples = load_split(settings.dataset, name, settings.dataset_config, settings.streaming)
    are_stated = settings.num_labels is not None or settings.label_names is not None
    together = settings.shuffle_buffer if isinstance(settings, TrainingSettings) else None
    columns = settings.image_column, settings.label_column
    split = open_split(samples, *columns, needs_labels, not are_stated, together)
    if split.label_column is not None and split.label_names is None and not split.is_sharded:
        split = _name_classes_of_tars(split, settings, name)
    if settings.exclude or settings.relabel:
        split, _ = clean(split, settings, name)
    split.skipped_file = None if settings.output_dir is None else Path(settings.output_dir) / SKIPPED_IMAGES
    return state_classes(split, settings.num_labels, settings.label_names) if are_stated else split


def _name_classes_of_tars(split: Split, settings: DataSettings, name: str) -> Split:
    """Name the classes of local tars, which have only numbers, as the index of `hf-vit shard` does."""
    path = Path(str(settings.dataset)).expanduser()
    if split.samples.info.builder_name != "webdataset" or not (path.is_dir() or path.suffix == ".tar"):
        return split
    files = load_split(str(path), re.split(r"[\[+]", name)[0], streaming=True)
    names = stored_class_names(files, Columns(settings.image_column, settings.label_column))
    return split if names is None else dataclasses.replace(split, label_names=names, num_labels=len(names))


def open_splits(settings: TrainingSettings, needs_labels: bool = True) -> tuple[Split, Split | None]:
    """Open the training and the evaluation split, with the same class numbers.

    Where the evaluation split is "auto" and the data have such a split, the setting becomes its name; where the loss is
    "auto", it becomes the one of the labels.

    Raises:
        ValueError: the classes differ, or images have no labels.
    """
    split = open_named(settings, settings.train_split, needs_labels)
    if needs_labels:
        require_labels(split, settings.train_split, two_classes=True)
    if split.multi_label and settings.task == "single-label":
        raise ValueError(f"task is single-label, but images of {settings.dataset} have several labels")
    if settings.loss == AUTO:
        settings.loss = "sigmoid" if split.multi_label or settings.task == "multi-label" else "softmax"
    if settings.eval_split == AUTO:
        names = str(settings.dataset), settings.dataset_config, settings.train_split
        settings.eval_split = find_eval_split(*names)
    if settings.eval_split is None:
        return split, None
    if settings.eval_split == AUTO:
        return split_off_holdout(split)
    eval_split = open_named(settings, settings.eval_split, needs_labels)
    require_labels(eval_split, settings.eval_split)
    return split, match_to_split(split, eval_split, settings.train_split, settings.eval_split)


def find_eval_split(dataset: str, config: str | None, train_split: str) -> str:
    """Return the name of the split to evaluate on; "auto" if only the training split exists."""
    names = names_of_splits(dataset, config)
    trained_on = train_split.split("[")[0]
    return next((name for name in _EVAL_SPLITS if name in names and name != trained_on), "auto")


def split_off_holdout(split: Split) -> tuple[Split, Split | None]:
    """Divide a split into training images and a held-out tenth of each class, drawn with a fixed seed.

    Nothing is held out of shards and of fewer than 10 images.
    """
    if split.is_sharded or len(split) < _FEWEST:
        return split, None
    classes = _classes_to_divide(split, "a held-out tenth")
    drawn = np.random.default_rng(0).permutation(len(split))
    by_class = [drawn[classes[drawn] == number] for number in np.unique(classes)]
    held_out = np.concatenate([rows[: round(_HELD_OUT * len(rows))] for rows in by_class])
    if not len(held_out):
        held_out = drawn[:1]  # at least one image
    return _select(split, np.setdiff1d(drawn, held_out)), _select(split, np.sort(held_out))


def split_into_folds(split: Split, folds: int) -> list[tuple[Split, Split]]:
    """Return the training images and the held-out images of each fold; every image is held out once.

    The images of each class are shuffled with a fixed seed and dealt to the folds in turn.

    Raises:
        ValueError: the images are in shards, or a class has fewer images than there are folds.
    """
    classes = _classes_to_divide(split, f"folds is {folds}")
    if (fewest := np.unique(classes, return_counts=True)[1].min()) < folds:
        raise ValueError(f"folds is {folds}, but a class has {fewest} images (expected one for each fold)")
    numbers = assign_folds(classes, folds)
    return [
        (_select(split, np.flatnonzero(numbers != fold)), _select(split, np.flatnonzero(numbers == fold)))
        for fold in range(folds)
    ]


def assign_folds(classes: np.ndarray, folds: int, seed: int = 0) -> np.ndarray:
    """Deal the shuffled images of each class to the folds in turn: (images,) fold numbers."""
    drawn = np.random.default_rng(seed).permutation(len(classes))
    numbers = np.empty(len(classes), np.int64)
    numbers[drawn[classes[drawn].argsort(kind="stable")]] = np.arange(len(classes)) % folds
    return numbers


def _classes_to_divide(split: Split, purpose: str) -> np.ndarray:
    """Return the class number of each image; all 0 without one label per image."""
    has_classes = split.label_column is not None and not split.multi_label
    return split.class_numbers(purpose) if has_classes else np.zeros(len(split), np.int64)


def _select(split: Split, rows: np.ndarray) -> Split:
    return dataclasses.replace(split, samples=split.samples.select(rows))
