"""Reports of a run: progress bar, trackers, learning curve, metrics, and facts for a model card."""

import datetime
import logging
import shlex
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..files.output import new_file
from ..files.pages import page_color
from ..files.versions import versions_of
from .curve_panels import PANELS, points_of
from .devices import describe_device
from .profiling import Profiler
from .run import Run
from .settings import TrainingSettings
from .speed import Speed

logger = logging.getLogger(__name__)
_BAR = "{desc}|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{remaining}{postfix}]"
_LOGGED_CLASSES = 20  # with more classes, trackers get no metrics per class
_PACKAGES = ("hf_vit", "torch", "transformers", "accelerate", "datasets")


def choose_trackers(report_to: str) -> list[str]:
    """Return the names of Accelerate's trackers; "auto" is TensorBoard if it is installed.

    Raises:
        ValueError: a tracker is unknown or not installed.
    """
    if report_to == "auto":
        return ["tensorboard"] if find_spec("tensorboard") or find_spec("tensorboardX") else []
    chosen = [name.strip() for name in report_to.split(",") if name.strip() != "none"]
    for name in chosen:
        if name not in ("tensorboard", "trackio", "wandb"):
            raise ValueError(f"--report-to is {name!r}; it must be auto, tensorboard, trackio, wandb or none")
        if not find_spec(name):
            raise ValueError(f"--report-to is {name}, but {name} is not installed: pip install {name}")
    return chosen


class Report:
    """Progress of one run, on the main process; checkpoints keep its history."""

    def __init__(self, run: Run):
        self.run, self.accelerator, self.settings = run, run.accelerator, run.settings
        self.tracking = bool(self.accelerator.log_with)
        self.started, self.start_step = time.perf_counter(), run.step
        self.speed = Speed(run)
        self.shown: dict[str, float] = {}  # newest value of each name
        is_main = self.accelerator.is_main_process
        self.bar = tqdm(
            total=run.num_steps,
            initial=run.step,
            bar_format=_BAR,
            disable=not is_main,
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 30,  # rarely in a log file
        )
        folder = Path(str(self.settings.output_dir)) / "profile"
        steps = self.settings.profile if is_main else None
        self.profiler = Profiler(steps, run.num_steps - run.step, folder, self.accelerator.print)
        if self.tracking:
            self._safely(self.accelerator.init_trackers, "training", config=_loggable(self.settings))

    def advance(self) -> None:
        """Record the end of an optimiser step."""
        self.bar.update()
        self.profiler.step()

    def close(self) -> None:
        """Record the end of the last step."""
        self.profiler.stop()
        self.bar.close()

    def choose(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation to log; those of more than 20 classes are only in metrics.json."""
        few = sum("/" in name for name in metrics) <= _LOGGED_CLASSES
        best = self.settings.best_metric
        return {name: value for name, value in metrics.items() if few or "/" not in name or name == best}

    def log(self, values: dict[str, float]) -> None:
        """Record values at the current step."""
        step = self.run.step
        self.run.history.append({"step": step, **values})
        measured = self.speed.close() if step > self.speed.step else {}  # an evaluation has no speed of its own
        self._show(values | measured)
        if self.tracking:
            left = (self.run.num_steps - step) * self._seconds() / max(step - self.start_step, 1)
            self._safely(self.accelerator.log, {**values, **measured, "seconds_left": left}, step=step)
        self.speed.begin()

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

    def _seconds(self) -> float:
        return time.perf_counter() - self.started

    def totals(self, skipped: int) -> dict[str, float]:
        """Return time, throughput and skipped images since the run was started or resumed."""
        seconds = self._seconds()
        images = (self.bar.n - self.start_step) * self.settings.batch_size
        return {"train_seconds": seconds, "train_images_per_second": images / seconds, "train_images_skipped": skipped}

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


def write_curve(history: list[dict], path: Path) -> None:
    """Draw the learning curve, if matplotlib is installed."""
    if not find_spec("matplotlib"):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    colors = {"training": page_color("soft"), "held out": page_color("bar")}  # as in report.html
    panels = (*PANELS, ("learning rate", "learning_rate", ""))
    for axes, (title, *names) in zip(figure.subplots(1, 3), panels, strict=True):
        for name, points in points_of(history, *names).items():
            if points:
                marker, width = ("o", 2.5) if name == "held out" else ("o" if len(points) == 1 else None, 1.5)
                axes.plot(*zip(*points, strict=True), label=name, color=colors[name], lw=width, marker=marker, ms=5)
        axes.set_xlim(left=0)
        axes.set_ylim(min(0, axes.dataLim.y0), 1.02 if title == "accuracy" else None)
        if title == "accuracy":
            axes.yaxis.set_major_formatter("{x:.0%}")
        axes.set_xlabel("optimiser step")
        axes.set_title(title, fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color=page_color("line"), lw=0.7)
        axes.set_axisbelow(True)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
    with new_file(path, overwrite=True) as file:
        figure.savefig(file, dpi=120)


def card_data(run: Run, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about a run for its model card."""
    settings = run.settings
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "base_model": getattr(settings, "model", None),
        "dataset": settings.dataset,
        "train_split": settings.train_split,
        "eval_split": settings.eval_split,
        "fingerprint": run.identity["data"],
        "settings": {name: value for name, value in vars(settings).items() if name != "output_dir"},
        "metrics": {name: value for name, value in metrics.items() if "/" not in name},  # not those of classes
        "processes": run.accelerator.num_processes,
        "device": describe_device(run.accelerator.device),
        "versions": versions_of(_PACKAGES),
    }
