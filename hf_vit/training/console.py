"""Console output of a run: plan, progress, speed and results; progress also goes to experiment trackers."""

import logging
import math
import shlex
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

import torch
from tqdm import tqdm

from ..data.devices import describe_device, find_peak, memory_in_use
from ..data.labels import distinguish, names_of
from ..data.loaders import TimedBatches
from ..data.workers import count_processors, count_workers
from ..files.messages import join_names
from ..files.runs import best_checkpoint_dir
from ..models.sizes import as_pair
from .reports import describe_best, held_out_of
from .run import Run, TrainState
from .trackers import start_trackers

logger = logging.getLogger(__name__)
_LOGGED_CLASSES = 20  # with more classes, trackers get no metrics per class
_SLOW_DATA = 0.1  # share of the time spent waiting for data, above which a warning is printed
_LISTED = 4  # number of class names to list
_MAX_WARM_UP = 5  # steps before the profiler records
_FORWARDS_PER_STEP = 3  # a backward costs as much as two forwards
_MIN_SECONDS = 60.0  # of training before a warning of slow data; in the first ones, workers start
# At 80 columns, ten cells of bar leave room for two values, and at 100 for three
BAR_FORMAT = "{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
# On a terminal, as many as fit, the most important first; a log file has all values
_SHOWN = {
    "loss": "loss",
    "accuracy": "accuracy",
    "eval_accuracy": "held out",
    "eval_mean_average_precision": "held out",
    "images_per_second": "images/s",
}


class Console:
    """Progress of a run, shown by the main process: progress bar, experiment trackers, speed and profiler.

    Logged values are also kept in `TrainState.history`, which checkpoints contain.

    Args:
        batches: the training batches, which measure the waiting for data.
        trains_all: whether no parameter is frozen.
    """

    def __init__(self, run: Run, state: TrainState, batches: TimedBatches, trains_all: bool):
        self.run, self.state, self.batches = run, state, batches
        self.accelerator, self.settings = run.accelerator, run.settings
        self.started, self.start_step = time.perf_counter(), state.step
        self.peak_images_per_second = _peak_images_per_second(run, trains_all)
        self.measured, self.waited = 0.0, 0.0  # seconds of training, and of waiting for data in them
        self.restart()
        self.shown: dict[str, float] = {}  # latest value by name
        self.warned_of_data = False
        is_main = self.accelerator.is_main_process
        self.bar = tqdm(
            total=run.num_steps,
            initial=self.start_step,
            unit=" steps",
            bar_format=BAR_FORMAT,
            disable=not is_main,
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 30,  # seconds; rarely in a log file
        )
        self.profiler = start_profiler(run, state.step) if is_main and self.settings.profile else None
        start_trackers(self.accelerator, self.settings, state.trackers, self.start_step)

    def close(self) -> None:
        """End the progress bar and the profile."""
        if self.profiler is not None:
            self.profiler.stop()
        self.bar.close()

    def advance(self) -> None:
        """Record the end of an optimizer step."""
        self.bar.update()
        if self.profiler is not None:
            self.profiler.step()

    def log(self, values: dict[str, float]) -> None:
        """Record values at the current step."""
        step = self.state.step
        self.state.history.append({"step": step, **values})
        if step > self.step:  # not only an evaluation since
            values = values | self._measure()
        self.shown |= values
        if sys.stderr.isatty():
            self.bar.set_postfix_str("", refresh=False)
            room = shutil.get_terminal_size().columns - len(str(self.bar))
            self.bar.set_postfix_str(describe_progress(self.shown, room))
        else:
            shown = {name: f"{value:.4g}" for name, value in self.shown.items() if "/" not in name}
            self.bar.set_postfix(shown, refresh=False)
        seconds = time.perf_counter() - self.started
        left = (self.run.num_steps - step) * seconds / max(step - self.start_step, 1)
        self.accelerator.log({**values, "seconds_left": left}, step=step)  # to the trackers
        self.restart()

    def restart(self) -> None:
        """Start a new measurement of the speed."""
        self.step, self.since = self.state.step, time.perf_counter()
        self.waited_before = self.batches.waited

    def _measure(self) -> dict[str, float]:
        """Return the speed since `restart`: images per second, share of time spent waiting for data, memory in GiB."""
        seconds = time.perf_counter() - self.since
        waited = self.batches.waited - self.waited_before
        images = (self.state.step - self.step) * self.settings.batch_size / seconds
        self.measured, self.waited = self.measured + seconds, self.waited + waited
        self._warn_of_slow_data(self.waited / self.measured)
        peak = {"share_of_peak": images / self.peak_images_per_second} if self.peak_images_per_second else {}
        memory = memory_in_use(self.accelerator.device)
        return {"images_per_second": images, "data_wait": waited / seconds, **peak, **memory}

    def log_evaluation(self, metrics: dict[str, float]) -> None:
        """Record the metrics of an evaluation; metrics per class only with at most 20 classes."""
        metrics = {name: value for name, value in metrics.items() if not isinstance(value, list)}  # no intervals
        few = sum("/" in name for name in metrics) <= _LOGGED_CLASSES
        best = self.settings.best_metric
        self.log({f"eval_{name}": x for name, x in metrics.items() if few or "/" not in name or name == best})

    def _warn_of_slow_data(self, share: float) -> None:
        """Warn once if training waits for data during a large share of the time."""
        if share <= _SLOW_DATA or self.measured < _MIN_SECONDS or self.warned_of_data or self.bar.disable:
            return
        self.warned_of_data = True
        workers = count_workers(self.settings.num_workers)
        enough = math.ceil(max(workers, 1) / (1 - min(share, 0.99)))
        logger.warning(
            f"Training waits for data {share:.0%} of the time. It needs about --num-workers {enough} (now: {workers}; "
            f"this process may use {count_processors()} CPUs). --reduced-decoding (for large JPEGs) and --augment-on "
            "device (with a GPU) also reduce the work."
        )

    def print_early_stop(self) -> None:
        """Print why the run ends before its last step."""
        state, patience = self.state, self.settings.early_stopping
        reason = f"{patience} evaluations in a row were no better than that of step {state.best_step}"
        self.accelerator.print(f"training ends at step {state.step} of {self.run.num_steps}: {reason}")

    def totals(self) -> dict[str, float]:
        """Return the time and throughput since the run was started or resumed, and the number of skipped images."""
        seconds = time.perf_counter() - self.started
        images = (self.state.step - self.start_step) * self.settings.batch_size
        rates = {"train_seconds": seconds, "train_images_per_second": images / seconds}
        return {**rates, "train_images_skipped": self.state.skipped}


def describe_progress(values: Mapping[str, float], room: int) -> str:
    """Return the most important of the values that fit into `room` columns, with the separator before each."""
    shown: list[str] = []
    for name, label in _SHOWN.items():
        if name in values:
            text = f"{label} {values[name]:.4g}"
            room -= len(f", {text}")
            if room < 0:
                break
            shown.append(text)
    return ", ".join(shown)


def print_plan(run: Run, parameters: Collection[torch.Tensor], augments_on_device: bool) -> None:
    """Print the plan of a run: model, data, length, device and output folder."""
    settings, accelerator, split, config = run.settings, run.accelerator, run.split, run.config
    assert split is not None
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    height, width = as_pair(config.image_size)
    size = f"{height} x {width} pixels"
    if settings.preset == "native":
        size = f"at most {math.prod(config.grid_size)} patches per image, native aspect ratios"
    model = getattr(settings, "model", None) or "random weights"
    share = f" ({trained:,} trainable)" if trained < total else ""
    trained_classes = split.classes_with_images()
    names = ""
    if split.label_names:
        names = f" ({join_names([split.label_names[number] for number in trained_classes], _LISTED)})"
    classes = f" of {len(trained_classes):,} classes{names}" if split.label_column is not None else ""
    held_out, where = run.eval_split, held_out_of(settings)
    steps = run.num_steps
    epochs = steps * settings.batch_size / max(len(split), 1)
    precision = "float32" if accelerator.mixed_precision == "no" else f"{accelerator.mixed_precision} autocast"
    augmented = "on the device" if augments_on_device else "in the data workers"
    rows = {
        "model": f"{model}: {total:,} parameters{share}, {size}",
        "train": f"{settings.dataset}, {settings.train_split}: {len(split):,} images{classes}",
        "evaluate": "nothing; set --eval-split" if held_out is None else f"{where}: {len(held_out):,} images",
        "length": f"{steps:,} optimizer steps of {settings.batch_size:,} images ({epochs:.3g} epochs)",
        "device": f"{describe_device(accelerator.device)}, {precision} (processes: {accelerator.num_processes})",
        "data": f"data workers: {count_workers(settings.num_workers)}; augmentation {augmented}",
        "result": settings.output_dir,
    }
    if unseen := _unseen_classes(run):
        rows["warning"] = f"these evaluation classes have no training images: {join_names(unseen, _LISTED)}"
    for name, text in rows.items():
        accelerator.print(f"{name:10}{text}")


def _unseen_classes(run: Run) -> list[str]:
    """Return the names of classes that occur only in the evaluation split; [] if labels are not known in advance."""
    splits = [split for split in (run.split, run.eval_split) if split is not None]
    if len(splits) < 2 or any(one.is_sharded or one.label_column is None for one in splits):
        return []
    trained, evaluated = (split.classes_with_images() for split in splits)
    names = distinguish(names_of(run.config))
    return [names[number] for number in evaluated if number not in trained]


def print_results(run: Run, metrics: dict[str, Any]) -> None:
    """Print the results of a run, where they are saved, and the next commands to try."""
    output, write = run.output, run.accelerator.print
    if "accuracy" in metrics:
        name = "mean_average_precision" if "mean_average_precision" in metrics else "accuracy"
        write(f"{name.replace('_', ' ')} {metrics[name]:.2%} on {metrics['samples']:,} held-out images")
        if run.num_steps:
            write(f"best: {describe_best(metrics)}")
    for name in (name for name in metrics if name.partition("/")[0] == "r2"):
        low, high = metrics[name.replace("r2", "r2_interval", 1)]
        error = metrics[name.replace("r2", "mae", 1)]
        title = name.replace("r2", "R²", 1).replace("/", " of ")
        write(f"{title} {metrics[name]:.3f} ({low:.3f} to {high:.3f}), mean absolute error {error:.4g}")
    if (output / "report.html").exists():
        write(f"mistakes are shown in {output / 'report.html'}")
    has_classes = getattr(run.settings, "objective", "supervised") == "supervised"
    model = shlex.quote(str(best_checkpoint_dir(str(output)) or output))
    use = f"predict {model} IMAGE" if has_classes else f"finetune --model {model} --dataset FOLDER"
    write(f"saved in {output}; try: hf-vit {use}, or hf-vit push {model} NAME")


def _peak_images_per_second(run: Run, trains_all: bool) -> float | None:
    """Return the images per second at the peak rate of the GPUs; None if this rate or the compute is unknown."""
    accelerator, settings = run.accelerator, run.settings
    varies = settings.preset == "native" or settings.patch_sizes  # in the number of patches
    peak = find_peak(describe_device(accelerator.device))
    # A part of the parameters needs a smaller backward pass
    if varies or not trains_all or peak is None or accelerator.mixed_precision not in ("bf16", "fp16"):
        return None
    from ..models.compute import FLOPS_PER_MULTIPLY_ADD, count_compute

    flops = _FORWARDS_PER_STEP * FLOPS_PER_MULTIPLY_ADD * count_compute(run.config).logits_multiply_adds
    return peak * accelerator.num_processes / flops


def start_profiler(run: Run, step: int) -> torch.profiler.profile | None:
    """Start to trace the next `profile` steps (or as many as the run has left), after a few for warm-up.

    Return None if no step is left.
    """
    left = run.num_steps - step
    steps = min(run.settings.profile or 0, left)
    if not steps:
        return None

    def write(profile: torch.profiler.profile) -> None:
        file = run.output / "profile" / "trace.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(file))
        print(f"The trace is {file}: open it in https://ui.perfetto.dev or chrome://tracing.")

    schedule = torch.profiler.schedule(wait=0, warmup=min(_MAX_WARM_UP, left - steps), active=steps, repeat=1)
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True)
    profiler.start()
    return profiler
