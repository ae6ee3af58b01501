"""Accuracy of a classifier: on a dataset's labels, on ImageNet's ReaL labels, and on ObjectNet."""

import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ..data.devices import describe_device
from ..data.fingerprint import fingerprint_data
from ..data.labels import match_to_model, names_of
from ..data.sources import Source
from ..data.splits import Split, find_eval_split, open_named, source_of
from ..data.summary import log_splits, write_unused
from ..data.targets import split_columns
from ..files.download import fetch
from ..files.messages import join_names, shorten
from ..files.pictures import to_mode
from ..files.reading import read_json, read_yaml
from ..inference.predictions import EvaluationBatches, predict, score
from ..inference.regression import evaluate_regression
from ..inference.result_page import HeldOut, title_of, write_results
from ..models.image_reading import load_image
from ..models.scores import score_function, thresholds_of
from ..models.sizes import MAX_LABELS
from ..settings.fields import AUTO, EvaluateSettings
from ..settings.recipes import dump
from .models import load_evaluated
from .training_images import divide_as_recorded, is_divided, read_record

_REAL_LABELS = "https://raw.githubusercontent.com/google-research/reassessed-imagenet/master/real.json"
_VALIDATION_FILE = re.compile(r"ILSVRC2012_val_(\d{8})")  # numbered from 1, in the order of the ReaL labels
_RED_BORDER = 2  # pixels at each side of ObjectNet's images, which its authors' code removes


def evaluate(settings: EvaluateSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Measure loss, top-1, top-5 and mean per-class accuracy; with `real_labels`, ReaL accuracy.

    Of a regression, measure the errors, R2 and rank correlation.
    """
    model, processor = load_evaluated(settings, accelerator, needs_head=True)
    is_regression = score_function(model.config) == "none"
    targets = names_of(model.config) if is_regression else []
    if targets and settings.label_column is not None:  # columns with other names
        targets = split_columns(settings.label_column, len(targets))
    split, name = open_default_split(settings, targets)
    if accelerator.is_main_process:
        print(f"evaluating {settings.model} on {settings.dataset}, {name}: {len(split):,} images", file=sys.stderr)
    if not is_regression:
        split = match_to_model(split, model.config, str(settings.model), settings.label_map)
    real = None if settings.real_labels is None else _match_real_labels(read_real_labels(settings.real_labels), split)
    thresholds = thresholds_of(model.config)
    if is_regression:
        batches = EvaluationBatches(settings, split, processor, model.config, accelerator)
        predictions, metrics = evaluate_regression(accelerator, model, batches, names_of(model.config))
    else:
        predictions = _run(settings, accelerator, model, processor, split)
        metrics = score(predictions, real, thresholds)
    if settings.output_dir and settings.protocol == "accuracy" and accelerator.is_main_process:
        held_out = HeldOut(predictions, split, names_of(model.config), Path(str(settings.dataset)), thresholds)
        processes = f", {accelerator.num_processes} processes" if accelerator.num_processes > 1 else ""
        facts = {
            "model": str(settings.model),
            "dataset": str(settings.dataset),
            "split": name,
            "device": describe_device(accelerator.device) + processes,
            "backend": settings.backend,
        }
        title = title_of(settings.model, settings.dataset)
        write_results(Path(settings.output_dir), held_out, title, facts, dump(settings))
    return metrics


def open_default_split(settings: EvaluateSettings, targets: Sequence[str] = ()) -> tuple[Split, str]:
    """Open the split of the settings, or by default test, else the images that the model's training held out.

    For data without either, it is another held-out split, or the only split.

    Args:
        targets: columns of numbers, for a regression.

    Returns:
        The split, and its name for messages.

    Raises:
        ValueError: the model was trained on an unknown part of these data.
    """
    source = source_of(settings)
    split, name, whole = _choose_split(settings, source, targets)
    log_splits(source, {whole: split})
    if settings.output_dir is not None:
        write_unused(Path(settings.output_dir), source.unused)
    return split, name


def _choose_split(settings: EvaluateSettings, source: Source, targets: Sequence[str]) -> tuple[Split, str, str]:
    """Return the split of `open_default_split`, its name for messages, and the name of the split that it is part of."""
    if settings.split is not None or "test" in (source.names or ["test"]):
        name = settings.split or "test"
        return open_named(settings, name, source=source, targets=targets), name, name
    record = read_record(str(settings.model)) or {}
    train_split = record.get("train_split") or settings.train_split
    is_trained_on = Path(str(record.get("dataset"))).resolve() == Path(source.name).resolve()
    if is_divided(record):
        whole = open_named(settings, train_split, source=source, targets=targets)
        train, held_out = divide_as_recorded(whole, record)
        if held_out is not None and fingerprint_data(train) == record.get("fingerprint"):
            return held_out, f"the held-out images of {train_split}", train_split
        if is_trained_on:
            raise ValueError(
                f"cannot find the images of {source.name} that were held out when {settings.model} was trained: the "
                "folder has changed, has fewer than 10 images, or was divided by an earlier version; use --split "
                f"{train_split} to evaluate all images"
            )
    name = record.get("eval_split") if is_trained_on else find_eval_split(source, train_split)
    name = train_split if name in (None, AUTO) else name
    return open_named(settings, name, source=source, targets=targets), name, name


def evaluate_real(settings: EvaluateSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Measure ReaL accuracy on ImageNet's validation images ("Are we done with ImageNet?").

    The labels are downloaded unless `real_labels` names a file.
    """
    settings.real_labels = settings.real_labels or _REAL_LABELS
    settings.split = settings.split or "validation"
    return evaluate(settings, accelerator)


def evaluate_objectnet(settings: EvaluateSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Measure top-1 and top-5 accuracy on ObjectNet's images of ImageNet's classes, among all classes of the model.

    Raises:
        ValueError: the model does not have 1,000 classes, or no image has a class of ImageNet.
    """
    from ..inference.metrics import set_accuracy  # importing evaluate takes seconds

    model, processor = load_evaluated(settings, accelerator, needs_head=True)
    if (count := model.config.num_labels) != 1000:
        raise ValueError(f"{settings.model} has {count} classes (expected the 1,000 of ImageNet for objectnet)")
    split = open_named(settings, settings.split or "train")
    classes, names = read_objectnet_classes(settings.objectnet_classes), split.label_names or []
    labels = split.class_numbers("--protocol is objectnet").tolist()
    chosen = [row for row, label in enumerate(labels) if 0 <= label < len(names) and names[label] in classes]
    if not chosen:
        raise ValueError(f"no class of {join_names(names)} is of ImageNet (expected names of ObjectNet's folders)")
    split.samples = split.samples.select(chosen)
    predictions = _run(settings, accelerator, model, partial(without_border, processor), split)
    accepted = [classes[names[labels[chosen[index]]]] for index in predictions["index"]]
    return {
        **set_accuracy(predictions["ranked"], accepted),
        "samples": len(accepted),
        "skipped": predictions["skipped"],
    }


def _run(
    settings: EvaluateSettings, accelerator: Accelerator, model: Any, processor: Any, split: Split
) -> dict[str, Any]:
    """Compute the model's predictions for a split; see `predict`."""
    batches = EvaluationBatches(settings, split, processor, model.config, accelerator)
    loss = "sigmoid" if score_function(model.config) == "sigmoid" else "softmax"
    return predict(accelerator, model, batches, loss)


def read_real_labels(source: str) -> list[list[int]]:
    """Read ReaL labels from a file or an address: the correct classes of each image, in order.

    Raises:
        ValueError: the content is not a list of lists of class indices, or the download fails.
    """
    labels = read_json(fetch(source).path)
    _check_class_lists(labels, source)
    return labels


def _check_class_lists(lists: Any, source: Any) -> None:
    """Raise ValueError unless a file has a list of lists of class indices."""
    for numbers in lists if isinstance(lists, list) else [lists]:
        if not isinstance(numbers, list) or any(type(one) is not int or not 0 <= one < MAX_LABELS for one in numbers):
            raise ValueError(f"{source} has {shorten(numbers)} (expected a list of class indices)")


def _match_real_labels(real: list[list[int]], split: Split) -> list[list[int]]:
    """Return the ReaL labels of every image of the split, by the number in its file name, or else by its index.

    Raises:
        ValueError: file names have no numbers, and there are not as many labels as images.
    """
    found = [_VALIDATION_FILE.search(Path(path or "").name) for path, _ in split.paths()]
    numbers = [int(match[1]) for match in found if match]
    if len(numbers) == len(split) and 0 < max(numbers, default=0) <= len(real):
        return [real[number - 1] for number in numbers]
    if len(real) != len(split):
        raise ValueError(
            f"there are {len(real)} ReaL labels for {len(split)} images (expected as many, or files named "
            "ILSVRC2012_val_00000001 and so on)"
        )
    return real


def read_objectnet_classes(path: str | None) -> dict[str, list[int]]:
    """Read the mapping from ObjectNet's folders to ImageNet's class indices.

    Args:
        path: a YAML file; None: the 113 folders of ObjectNet's authors.

    Raises:
        ValueError: the file is not such a mapping.
    """
    classes = read_yaml(str(files("hf_vit.evaluation") / "objectnet.yaml") if path is None else Path(path).expanduser())
    _check_class_lists(list(classes.values()) if isinstance(classes, dict) else classes, path)
    return classes


def without_border(processor: Any, images: list[Any], **options: Any) -> Any:
    """Process images, decoded or as {"bytes", "path"}, without their red border."""
    inner = []
    for image in images:
        name = image["path"] if isinstance(image, dict) else ""
        decoded = to_mode(load_image(image, name=name), "RGB", name=name)
        width, height = decoded.size
        inner.append(decoded.crop((_RED_BORDER, _RED_BORDER, width - _RED_BORDER, height - _RED_BORDER)))
    return processor(inner, **options)
