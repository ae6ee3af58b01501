"""`hf_vit.plan`: settings for fine-tuning, from the data and the measured speed of this machine."""

import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ..data.devices import describe_device, is_accelerator
from ..data.samplers import BatchLayout
from ..data.splits import Split, open_splits
from ..files.pictures import read_size
from ..loading import check_name
from ..models.configuration_hf_vit import HfViTConfig
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.image_reading import ImageReadingError
from ..models.modeling_hf_vit_variants import HfViTForImageClassification
from ..settings.fields import FinetuneSettings
from ..settings.recipes import build_settings, read_recipe
from .build import build_objective, count_steps, load_for_finetuning, train_transform, training_batches
from .launch import start_accelerator

RECIPE = "finetune_small"
MODELS = {f"augreg:{variant}": variant for variant in ("Ti/16", "S/16", "B/16", "L/16")}  # smallest first
_USUAL_SIZE = 224  # pixels
_SIZES = (384, _USUAL_SIZE, 160, 112)
_MAX_INSPECTED = 5_000  # images whose size and content are read
_BATCHES = ((2_000, 32), (10_000, 64))  # (number of images, batch size for datasets with fewer)
_LARGEST_BATCH = 128
_RATE, _RATE_BATCH, _LARGEST_RATE = 0.003, 32, 0.03  # rate and batch size of the recipe; largest for CIFAR in Table 4
_EPOCHS = 5
_STEPS = 100, 10_000  # smallest and largest number; 10,000 is that of the paper for CIFAR
_IMBALANCE = 4  # ratio of the largest to the smallest class, above which classes are drawn equally often
_LONG = 2.0  # ratio of the longer to the shorter side, above which an image counts as long
_EVALUATIONS = 10  # per run; a forward takes a third of the time of a training step


@dataclass
class Plan:
    """Proposal for a fine-tuning run.

    Args:
        data: statistics of the images, such as "images", "classes" and "exact_duplicates".
        settings: fields of `FinetuneSettings`, on top of `recipe`.
        reasons: the reason for each field of `settings`.
        steps: number of optimizer steps of the run.
        seconds: estimated time of the run on this machine.
        notes: other advice.
    """

    data: dict[str, Any]
    recipe: str = RECIPE
    settings: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return the plan as lines of text."""
        data, (low, median, high) = self.data, self.data["shorter_side"]
        what = f"{data['targets']:,} targets" if "targets" in data else f"{data['classes']:,} classes"
        images = f"{data['images']:,} training images of {what}"
        rows = [("data", f"{images}, {data['held_out']:,} held-out images")]
        if data["largest_class"]:  # shards are not inspected
            rows += [
                ("", f"{_span(data['smallest_class'], data['largest_class'])} images per class"),
                ("", f"shorter side {_span(low, high)} pixels, median {median:,}"),
                ("", f"{data['long']:.0%} longer than {_LONG:g}:1"),
                ("", f"{data['exact_duplicates']:,} exact duplicates, {data['leaks']:,} of them held out"),
            ]
        rows.append(("recipe", self.recipe))
        rows += [(name.replace("_", " "), f"{value}: {self.reasons[name]}") for name, value in self.settings.items()]
        rows.append(("time", f"about {self.seconds:,.0f} seconds for {self.steps:,} steps, measured on this machine"))
        rows += [("note", text) for text in self.notes]
        return "\n".join(f"{name:16}{text}" for name, text in rows)


def plan(
    dataset: str | os.PathLike[str], model: str | os.PathLike[str] | None = None, minutes: float = 30, **settings: Any
) -> Plan:
    """Propose model, image size, batch size and length of a fine-tuning run, as `hf-vit plan` does.

    Each candidate, a model at an image size, is timed for two training steps. At most 5,000 images are inspected; those
    of shards are not.

    Args:
        dataset: as in `finetune`.
        model: the model to fine-tune; None: the largest of AugReg's Ti/16, S/16, B/16 and L/16 that can finish in time.
        minutes: time limit of the run on this machine.
        settings: other fields of `FinetuneSettings`, such as `image_size=384`, which the plan does not change.

    Raises:
        ValueError: a setting is unknown or wrong, or the data cannot be used.

    Example:
        >>> plan = hf_vit.plan("photographs", "ti16")
        >>> hf_vit.finetune("ti16", "photographs", "out", recipe=plan.recipe, **plan.settings)
    """
    given = {**settings, "dataset": str(dataset)}
    if model is not None:
        check_name(model)
        given["model"] = str(model)
    run = build_settings(FinetuneSettings, {"model": next(iter(MODELS)), "output_dir": "unused", **given}, RECIPE)
    run.output_dir = None  # nothing is written, not even the list of unreadable images
    split, eval_split = open_splits(run)
    data = describe_images(split, eval_split)
    result = Plan(data)

    def choose(name: str, value: Any, reason: str) -> None:
        if name not in given:
            result.settings[name] = value
            result.reasons[name] = reason
            setattr(run, name, value)

    _choose_batches_and_length(choose, len(split), run)
    has_one_class_each = not split.targets and not split.multi_label
    if has_one_class_each and data["largest_class"] > _IMBALANCE * max(data["smallest_class"], 1):
        reason = f"{_span(data['smallest_class'], data['largest_class'])} images per class"
        choose("class_sampling", "balanced", reason)

    result.steps = count_steps(run, split)
    held_out = 0 if eval_split is None else len(eval_split)
    num_images = result.steps * run.batch_size + _EVALUATIONS * held_out / 3  # a forward pass is a third of a step
    accelerator = start_accelerator(replace(run, report_to="none", num_workers=0))
    shorter_side = data["shorter_side"][1]
    models = list(MODELS)
    if "model" in given:
        models = [given["model"]]
    sizes: list[Any] = [size for size in _SIZES if size <= max(shorter_side, _USUAL_SIZE)]
    if given.get("image_size") is not None:
        sizes = [given["image_size"]]

    def measure(model: str, size: Any) -> float:
        candidate = replace(run, model=model, image_size=size)
        return num_images * _seconds_per_image(candidate, given, split, accelerator)

    found: Any = [_fit_into_time(measure, models, sizes, minutes * 60)]
    network, size, result.seconds = broadcast_object_list(found)[0]  # processes measure different times
    is_long = result.seconds > minutes * 60
    fits = f"the largest that can finish in {minutes:g} minutes on {describe_device(accelerator.device)}"
    choose("model", network, "the smallest" if is_long else fits)
    choose("image_size", size, f"for the time limit and the images' median shorter side, {shorter_side} pixels")
    if is_long:
        result.notes.append(f"the run takes longer than {minutes:g} minutes; reduce --epochs, or set --linear-probe")
    result.notes += _notes_on(data)
    return result


def _notes_on(data: dict[str, Any]) -> list[str]:
    """Return advice on the images that `describe_images` describes."""
    notes = []
    if data["exact_duplicates"]:
        notes.append("hf-vit audit lists the duplicates and leaks, and near-duplicates")
    if data["long"] > 0.5:
        notes.append(f"most images are longer than {_LONG:g}:1; --preset native keeps their aspect ratios")
    return notes


def _choose_batches_and_length(choose: Callable[[str, Any, str], None], images: int, run: FinetuneSettings) -> None:
    """Choose batch size, learning rate and epochs by the number of training images.

    Args:
        choose: sets a field of `run` that the user did not set: its name, value and reason.
    """
    batch_size = next((size for limit, size in _BATCHES if images < limit), _LARGEST_BATCH)
    choose("batch_size", batch_size, f"for a training set of {images:,} images")
    rate = min(_RATE * run.batch_size / _RATE_BATCH, _LARGEST_RATE)
    choose("learning_rate", rate, f"{_RATE:g} per {_RATE_BATCH} images of the batch, at most {_LARGEST_RATE:g}")
    if run.steps is None:
        shortest, longest = _STEPS
        steps = min(max(round(_EPOCHS * images / run.batch_size), shortest), longest)
        reason = f"about {_EPOCHS} epochs, but at least {shortest} and at most {longest:,} steps"
        choose("epochs", round(steps * run.batch_size / images, 2), reason)


def plan_recipe(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `finetune --recipe auto`, and print the plan; a resumed run keeps those of its recipe.yaml.

    Args:
        values: the fields given by the user, which override those of the plan.
    """
    file = Path(str(values.get("output_dir")), "recipe.yaml")
    if values.get("resume") and file.is_file():
        return read_recipe(file)
    own = {name: value for name, value in values.items() if name not in ("dataset", "model")}
    found = plan(values.get("dataset") or "", values.get("model"), **own)
    if int(os.environ.get("RANK") or 0) == 0:
        print(found.describe(), file=sys.stderr)  # --print-config writes a recipe to the standard output
    return read_recipe(found.recipe) | found.settings


def _span(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def describe_images(split: Split, eval_split: Split | None) -> dict[str, Any]:
    """Return statistics of the images of a split; "leaks" is the number of their copies among the held-out images."""
    digests, sizes = _read(split)
    held_out = Counter() if eval_split is None else _read(eval_split)[0]
    leaks = sum(count for digest, count in held_out.items() if digest in digests)
    counts = np.zeros(split.num_labels, int)
    if not split.is_sharded and not split.targets:
        for numbers, count in split.label_counts().items():
            counts[[number for number in numbers if number >= 0]] += count
    shorter = sizes.min(axis=1)
    return {
        "images": len(split),
        "held_out": 0 if eval_split is None else len(eval_split),
        **({"targets": len(split.targets)} if split.targets else {"classes": len(split.classes_with_images())}),
        "smallest_class": int(counts.min()),
        "largest_class": int(counts.max()),
        "shorter_side": [int(shorter.min()), int(np.median(shorter)), int(shorter.max())],
        "long": float((sizes.max(axis=1) > _LONG * shorter).mean()),
        "exact_duplicates": digests.total() - len(digests) + leaks,
        "leaks": leaks,
    }


def _read(split: Split) -> tuple[Counter[bytes], np.ndarray]:
    """Return the number of images by the digest of their bytes, and the (height, width) of each readable image."""
    digests: Counter[bytes] = Counter()
    sizes = []
    rows = [] if split.is_sharded else np.linspace(0, len(split) - 1, min(len(split), _MAX_INSPECTED)).astype(int)
    for row in map(int, rows):
        image = split.image(split.samples[row], row)
        try:
            content = image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()
            sizes.append(read_size(content))
        except (ImageReadingError, OSError):
            continue
        digests[hashlib.sha256(content).digest()] += 1
    return digests, np.array(sizes or [(_USUAL_SIZE, _USUAL_SIZE)])


def _fit_into_time(
    measure: Callable[[str, Any], float], models: list[str], sizes: list[Any], limit: float
) -> tuple[str, Any, float]:
    """Return the largest model that fits at 224 pixels, its largest image size that fits, and the seconds of the run.

    Args:
        measure: seconds of the run for a model at an image size.
        limit: time limit in seconds.
    """
    usual = _USUAL_SIZE if _USUAL_SIZE in sizes else sizes[0]
    model, seconds = models[0], measure(models[0], usual)
    for larger in models[1:]:
        # The next model takes at least twice as long
        if 2 * seconds > limit or (needed := measure(larger, usual)) > limit:
            break
        model, seconds = larger, needed
    for size in sizes:
        needed = seconds if size == usual else measure(model, size)
        if needed <= limit:
            break
    return model, size, needed


def _seconds_per_image(
    settings: FinetuneSettings, given: dict[str, Any], split: Split, accelerator: Accelerator
) -> float:
    """Return the seconds of a training step divided by its number of images over all processes."""
    settings = replace(settings, num_workers=0, class_sampling="natural")
    if "model" in given:
        network, processor = load_for_finetuning(settings, split)
    else:  # the weights are not needed to measure the speed
        fields = {"num_labels": split.num_labels, "image_size": settings.image_size}
        config = HfViTConfig.from_variant(MODELS[str(settings.model)], **fields)
        network: Any = HfViTForImageClassification(config)
        processor = HfViTImageProcessor.for_model(config)
    device = accelerator.device
    network.to(device).train()
    objective = build_objective(settings, processor, network.config, split, device)
    images = min(64, settings.batch_size) if is_accelerator(device) else 8
    transform = train_transform(settings, processor, network.config)
    seconds, started = 0.0, time.perf_counter()
    for batch in training_batches(settings, split, transform, BatchLayout(images, images), range(2)):
        with accelerator.autocast():
            tensors = {name: tensor.to(device) for name, tensor in batch.items()}
            losses, _ = objective(network, tensors, np.random.default_rng(0))
        losses.mean().backward()
        float(losses.detach().sum())  # waits for the device
        # Overwritten by the second step; the first is warm-up
        seconds, started = time.perf_counter() - started, time.perf_counter()
    return seconds / images / accelerator.num_processes
