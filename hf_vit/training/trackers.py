"""Experiment trackers of a run, which are Accelerate's: a resumed run continues theirs, and survives their failures."""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, filter_trackers, get_available_trackers

from ..files.messages import join_names
from ..settings.fields import AUTO, TrainingSettings

logger = logging.getLogger(__name__)

_DEFAULT_PROJECT = "training"
# The trackers' own variables for a project, which Accelerate would override
_PROJECT_VARIABLES = {"wandb": "WANDB_PROJECT", "comet_ml": "COMET_PROJECT_NAME", "swanlab": "SWANLAB_PROJECT"}
_NAME_ARGUMENTS = {
    "clearml": "task_name",
    "mlflow": "run_name",
    "swanlab": "experiment_name",
    "trackio": "name",
    "wandb": "name",
}


def choose_trackers(report_to: str) -> list[str]:
    """Return the names of Accelerate's trackers; "auto" is TensorBoard if it is installed.

    Raises:
        ValueError: a tracker is unknown or not installed.
    """
    if report_to == AUTO:
        return ["tensorboard"] if find_spec("tensorboard") or find_spec("tensorboardX") else []
    names = [name.strip() for name in report_to.split(",") if name.strip() != "none"]
    if "all" in names:
        return [str(name) for name in get_available_trackers()]
    for name in names:
        is_known = name in LOGGER_TYPE_TO_CLASS
        if not is_known or not filter_trackers([name], logging_dir="."):
            problem = "is not installed" if is_known else "is not one of Accelerate's trackers"
            raise ValueError(
                f"--report-to is {report_to!r}, but {name} {problem}; it must be auto, none, all, or some of "
                f"{join_names(sorted(LOGGER_TYPE_TO_CLASS), 20)}"
            )
    return names


class GuardedTracker(GeneralTracker):
    """A tracker of Accelerate; after a failure, which is reported once, it does nothing, and the run continues.

    Args:
        arguments, options: of Accelerate's class of this tracker.
    """

    requires_logging_directory = False

    def __init__(self, name: str, /, *arguments: str, **options: Any):
        self.name, self.arguments, self.options = name, arguments, options
        self.inner: GeneralTracker | None = None  # once it has started
        super().__init__()

    @property
    def tracker(self) -> Any:
        """The tracker's own run; None if it failed."""
        inner: Any = self.inner
        return None if inner is None else inner.tracker

    def start(self) -> None:
        """Start the tracker."""
        with self._reporting_failure():
            inner = LOGGER_TYPE_TO_CLASS[self.name](*self.arguments, **self.options)
            inner.start()
            self.inner = inner

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the settings of the run."""
        if self.inner is not None:
            with self._reporting_failure():
                self.inner.store_init_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        """Log values of a step."""
        if self.inner is not None:
            with self._reporting_failure():
                self.inner.log(values, step, **options)

    def finish(self) -> None:
        """Finish the tracker's run."""
        if self.inner is not None:
            with self._reporting_failure():
                self.inner.finish()
        self.inner = None

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # wandb exits after a cancelled login
            self.inner = None
            reason = str(error) or type(error).__name__
            logger.warning(f"The tracker {self.name} failed ({reason}); training continues without it.")


def start_trackers(accelerator: Accelerator, settings: TrainingSettings, runs: dict[str, str], step: int) -> None:
    """Start the trackers of `report_to`, on the main process.

    Args:
        runs: name of a tracker -> its own identifier of the run, from the checkpoint; those of new runs are added.
        step: number of optimizer steps done; above 0, the trackers' runs are continued.
    """
    accelerator.trackers.clear()
    if not accelerator.is_main_process:
        return
    trackers = []
    for name in choose_trackers(settings.report_to):
        project = settings.tracker_project or os.environ.get(_PROJECT_VARIABLES.get(name, ""), _DEFAULT_PROJECT)
        if name == "tensorboard":
            project = _DEFAULT_PROJECT  # the folder in `output_dir`, which has one run
        folder = [str(settings.output_dir)] if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory else []
        trackers.append(GuardedTracker(name, project, *folder, **_run_options(name, settings, runs, step)))
    accelerator.log_with = trackers
    # TensorBoard accepts only these types; the settings of a continued run are stored already
    config = {k: v if isinstance(v, int | float | str) else str(v) for k, v in vars(settings).items()}
    accelerator.init_trackers(_DEFAULT_PROJECT, None if step else config)
    for tracker in trackers:
        if tracker.name == "mlflow" and tracker.tracker is not None:
            runs["mlflow"] = tracker.tracker.info.run_id


def _run_options(name: str, settings: TrainingSettings, runs: dict[str, str], step: int) -> dict[str, Any]:
    """Return a tracker's arguments for the name of its run, and to continue the run of the checkpoint."""
    options: dict[str, Any] = {}
    if settings.tracker_name is not None and name in _NAME_ARGUMENTS:
        options[_NAME_ARGUMENTS[name]] = settings.tracker_name
    if name == "tensorboard" and step:
        options["purge_step"] = step + 1  # readers drop what a killed run logged after its checkpoint
    if name in ("swanlab", "wandb"):
        runs.setdefault(name, secrets.token_hex(8))
        options |= {"id": runs[name], "resume": "allow"}
    if name == "trackio":  # which knows a run by its name
        runs.setdefault(name, settings.tracker_name or Path(str(settings.output_dir)).name)
        options |= {"name": runs[name], "resume": "allow" if step else "never"}
    if name == "mlflow" and step:
        options["run_id"] = runs.get(name)
    return options
