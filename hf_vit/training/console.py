"""Everything that a run prints: its plan, its progress (also to experiment trackers), and its results."""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ..data.labels import distinguish, names_of
from ..data.splits import Split
from ..loading import find_better
from ..models.configuration_hf_vit import as_pair
from .launch import describe_device
from .settings import AUTO, TrainingSettings
from .speed import Profiler, Speed

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger(__name__)
_BAR = "{desc}|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"
_LOGGED_CLASSES = 20  # with more classes, trackers get no metrics per class
_LISTED = 4  # number of class names to list


class Console:
    """Progress of a run, on the main process: bar, trackers, speed and trace. Checkpoints keep its history."""

    def __init__(self, trainer: "Trainer"):
        self.trainer, self.accelerator, self.settings = trainer, trainer.accelerator, trainer.settings
        self.tracking = bool(self.accelerator.log_with)
        self.started, self.start_step = time.perf_counter(), trainer.state.step
        self.speed = Speed(trainer)
        self.shown: dict[str, float] = {}  # newest value of each name
        is_main = self.accelerator.is_main_process
        self.bar = tqdm(
            total=trainer.num_steps,
            initial=self.start_step,
            bar_format=_BAR,
            disable=not is_main,
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 30,  # rarely in a log file
        )
        steps = self.settings.profile if is_main else None
        left = trainer.num_steps - self.start_step
        self.profiler = Profiler(steps, left, trainer.output / "profile", self.accelerator.print)
        if self.tracking:
            self._safely(self.accelerator.init_trackers, "training", config=_loggable(self.settings))

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *error: object) -> None:
        self.profiler.stop()
        self.bar.close()

    def advance(self) -> None:
        """Record the end of an optimizer step."""
        self.bar.update()
        self.profiler.step()

    def log(self, values: dict[str, float]) -> None:
        """Record values at the current step."""
        step = self.trainer.state.step
        self.trainer.state.history.append({"step": step, **values})
        measured = self.speed.close() if step > self.speed.step else {}  # an evaluation has no speed of its own
        self._show(values | measured)
        if self.tracking:
            seconds = time.perf_counter() - self.started
            left = (self.trainer.num_steps - step) * seconds / max(step - self.start_step, 1)
            self._safely(self.accelerator.log, {**values, **measured, "seconds_left": left}, step=step)
        self.speed.begin()

    def log_evaluation(self, metrics: dict[str, float]) -> None:
        """Record the metrics of an evaluation; those of more than 20 classes are only in metrics.json."""
        few = sum("/" in name for name in metrics) <= _LOGGED_CLASSES
        best = self.settings.best_metric
        self.log({f"eval_{name}": x for name, x in metrics.items() if few or "/" not in name or name == best})

    def _show(self, values: dict[str, float]) -> None:
        """Show accuracy and loss before the bar and the speed after it; in a log file all values follow."""
        self.shown |= values
        rates = {"accuracy": "accuracy", "eval_accuracy": "held out", "eval_patch_accuracy": "held out"}
        texts = [f"{text} {self.shown[name]:.1%}" for name, text in rates.items() if name in self.shown]
        self.bar.set_description_str(f"{', '.join(texts)}, loss {self.shown['loss']:.3g} ", refresh=False)
        texts = [f"{self.shown['images_per_second']:.3g} images/s"]
        if not sys.stderr.isatty():
            others = self.shown.keys() - {"accuracy", "loss", "images_per_second"}
            texts += [f"{name}={self.shown[name]:.4g}" for name in sorted(others) if "/" not in name]
        self.bar.set_postfix_str(", ".join(texts), refresh=sys.stderr.isatty())

    def print_early_stop(self) -> None:
        """Say why the run ends before its last step."""
        trainer, best = self.trainer, self.trainer.best_evaluation()["best_step"]
        reason = f"{self.settings.early_stopping} evaluations in a row were no better than that of step {best}"
        self.accelerator.print(f"training ends at step {trainer.state.step} of {trainer.num_steps}: {reason}")

    def totals(self) -> dict[str, float]:
        """Return time, throughput and skipped images since the run was started or resumed."""
        seconds = time.perf_counter() - self.started
        images = (self.bar.n - self.start_step) * self.settings.batch_size
        rates = {"train_seconds": seconds, "train_images_per_second": images / seconds}
        return {**rates, "train_images_skipped": self.trainer.state.skipped}

    def _safely(self, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Call a tracker; if it fails, stop reporting and continue training."""
        try:
            function(*arguments, **options)
        except Exception as error:
            self.tracking = False
            logger.warning(f"The tracker failed ({error}); training continues without it.")


def _loggable(settings: TrainingSettings) -> dict[str, int | float | str | bool]:
    """Convert settings to the types that TensorBoard accepts."""
    return {k: v if isinstance(v, int | float | str) else str(v) for k, v in vars(settings).items()}


def describe_best(best: dict[str, Any]) -> str:
    """Describe the result of `Trainer.best_evaluation`: "91.20% after step 300"; any other metric has its name."""
    name, value = best["best_metric"], best["best"]
    shown = f"{value:.2%}" if name == "accuracy" else f"{name} {value:.4g}"
    return f"{shown} after step {best['best_step']:,}"


def announce(trainer: "Trainer") -> None:
    """Print the plan of a run: model, data, length, device and output folder."""
    for name, text in _plan(trainer):
        trainer.accelerator.print(f"{name:10}{text}")


def _plan(trainer: "Trainer") -> Iterator[tuple[str, str]]:
    settings, accelerator, split, config = trainer.settings, trainer.accelerator, trainer.split, trainer.config
    sizes = {name: parameter.numel() for name, parameter in trainer.parameters.items()}
    trained = sum(sizes[name] for name, parameter in trainer.parameters.items() if parameter.requires_grad)
    total = sum(sizes.values())
    height, width = as_pair(config.image_size)
    size = f"{height} x {width} pixels"
    if settings.preset == "native":
        size = f"at most {math.prod(config.grid_size)} patches an image, aspect ratios kept"
    share = "" if trained == total else f" ({trained:,} trainable)"
    yield "model", f"{getattr(settings, 'model', None) or 'random weights'}: {total:,} parameters{share}, {size}"
    yield "train", f"{settings.dataset}, {settings.train_split}: {_describe(split)}"
    yield "evaluate", _describe_evaluation(settings, trainer.eval_split)
    if unseen := _unseen_classes(trainer):
        yield "warning", f"no image to train on has a class of the evaluation: {_list(unseen)}"
    steps = trainer.num_steps
    epochs = steps * settings.batch_size / max(len(split), 1)
    yield "length", f"{steps:,} optimiser steps of {settings.batch_size:,} images ({epochs:.3g} epochs)"
    processes = f", {accelerator.num_processes} processes" if accelerator.num_processes > 1 else ""
    precision = {"no": "float32"}.get(accelerator.mixed_precision, f"{accelerator.mixed_precision} autocast")
    yield "device", f"{describe_device(accelerator.device)}, {precision}{processes}"
    yield "result", str(settings.output_dir)


def _describe(split: Split) -> str:
    """Summary of a split: `244 images of 2 classes (ants, bees)`."""
    images = f"{len(split):,} images"
    if split.label_column is None:
        return images
    listed = f" ({_list(split.label_names)})" if split.label_names else ""
    return f"{images} of {split.num_labels:,} classes{listed}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


def _unseen_classes(trainer: "Trainer") -> list[str]:
    """Names of the classes that only images of the evaluation have; none where labels are not read in advance."""
    splits = [split for split in (trainer.split, trainer.eval_split) if split is not None]
    if len(splits) < 2 or any(one.is_sharded or one.multi_label or one.label_column is None for one in splits):
        return []
    trained, evaluated = (np.unique(split.class_numbers()) for split in splits)
    names = distinguish(names_of(trainer.config))
    return [names[number] for number in np.setdiff1d(evaluated, trained) if number >= 0]


def _describe_evaluation(settings: TrainingSettings, split: Split | None) -> str:
    if split is None:
        return "nothing; set --eval-split"
    if settings.eval_split == AUTO:
        return f"{len(split):,} of the training images, a tenth of each class, which are not trained on"
    return f"{settings.dataset}, {settings.eval_split}: {len(split):,} images"


def conclude(trainer: "Trainer", metrics: dict[str, Any]) -> None:
    """Print the results of a run, where they are saved, and the next commands to try."""
    output, say = trainer.output, trainer.accelerator.print
    if "accuracy" in metrics:
        best = f"; best {describe_best(metrics)}, in {output / 'best'}" if metrics["best"] is not None else ""
        say(f"accuracy {metrics['accuracy']:.2%} on {metrics['samples']:,} held-out images{best}")
    if (output / "report.html").exists():
        say(f"mistakes are shown in {output / 'report.html'}")
    has_classes = getattr(trainer.settings, "objective", "supervised") == "supervised"
    model = find_better(str(output)) or output
    use = f"predict {model} IMAGE" if has_classes else f"finetune --model {model} --dataset FOLDER"
    say(f"saved in {output}; try: hf-vit {use}, or hf-vit push {model} NAME")
