"""Experiment trackers: their failures change nothing, and a resumed run continues theirs."""

import json
import os
import shutil
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hf_vit
from hf_vit.settings.fields import PretrainSettings
from hf_vit.training import trackers

from ..commands import pretrain
from ..photographs import write_colors
from ..processes import ONE_STEP, arguments

SIX_STEPS = {**ONE_STEP, "steps": 6, "schedule": "constant"}


@pytest.mark.parametrize(
    ("stage", "error"),
    [("start", SystemExit), ("store_init_configuration", OSError), ("log", OSError), ("finish", AttributeError)],
)
def test_a_failure_is_reported_once_and_changes_nothing(tiny, tmp_path, monkeypatch, caplog, stage, error):
    """All folds run, the metrics are returned, and the models are saved for transformers."""

    def fail(self, *_, **__):
        raise error("the disk of the logs is gone")

    monkeypatch.setattr(TensorBoardTracker, stage, fail)
    colors = write_colors(tmp_path / "colors", train=4)
    run = {"folds": 2, "steps": 2, "batch_size": 4, "num_workers": 0, "log_every": 1, "save_for": "transformers"}
    results = hf_vit.finetune(tiny, colors, tmp_path / "out", report_to="tensorboard", **run)
    assert len(results["folds"]) == 2
    for fold in ("fold_1", "fold_2"):
        assert json.loads((tmp_path / "out" / fold / "config.json").read_text())["model_type"] == "vit"
    warnings = [record.getMessage() for record in caplog.records if record.name == "hf_vit.training.trackers"]
    assert len(warnings) == 2  # one of each fold
    assert all("the disk of the logs is gone" in warning for warning in warnings)


def test_tensorboard_has_each_step_once_after_a_crash(tmp_path):
    """The run logged steps 5 and 6, and was killed before it saved them."""
    run = SIX_STEPS | {"report_to": "tensorboard", "log_every": 1, "save_every": 4, "output_dir": tmp_path / "out"}
    pretrain(arguments(**run))
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step_00000006")
    pretrain(arguments(**run, resume="true"))
    events = EventAccumulator(str(tmp_path / "out" / "training")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


class OwnTracker(GeneralTracker):
    """A tracker that a user has written; `runs` has what each of its runs was given."""

    requires_logging_directory = False
    runs: ClassVar[list["OwnTracker"]] = []

    def __init__(self, project: str, **options: Any):
        super().__init__()
        self.given = project, options
        self.stored, self.logged, self.is_finished = {}, [], False

    tracker = property(lambda self: SimpleNamespace(info=SimpleNamespace(run_id="theirs")))

    def start(self):
        self.runs.append(self)

    def store_init_configuration(self, values):
        self.stored = values

    def log(self, values, step=None, **_):
        self.logged.append(step)

    def finish(self):
        self.is_finished = True


@pytest.fixture
def own_tracker(monkeypatch):
    """Return a class of trackers that a name of Accelerate's stands for."""

    def install(name: str) -> type[OwnTracker]:
        own = type("Own", (OwnTracker,), {"name": name, "runs": []})
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, own)
        return own

    return install


def test_a_tracker_of_the_user(tmp_path, own_tracker):
    """Accelerate's `register_tracker_class` makes it known by its name."""
    own = own_tracker("own")
    pretrain(arguments(**SIX_STEPS | {"report_to": "own", "tracker_project": "digits"}, output_dir=tmp_path / "out"))
    [run] = own.runs
    assert run.given == ("digits", {})
    assert run.stored["steps"] == 6
    assert set(run.logged) == {1, 2, 3, 4, 5, 6}
    assert run.is_finished


@pytest.mark.parametrize(
    ("name", "variables", "settings", "project", "first", "again"),
    [
        ("wandb", {}, {}, "training", {"id": "ID", "resume": "allow"}, {"id": "ID", "resume": "allow"}),
        ("wandb", {"WANDB_PROJECT": "theirs"}, {}, "theirs", {"id": "ID", "resume": "allow"}, None),
        (
            "wandb",
            {"WANDB_PROJECT": "theirs"},
            {"tracker_project": "mine", "tracker_name": "first try"},
            "mine",
            {"name": "first try", "id": "ID", "resume": "allow"},
            None,
        ),
        ("mlflow", {}, {"tracker_name": "x"}, "training", {"run_name": "x"}, {"run_name": "x", "run_id": "theirs"}),
        ("trackio", {}, {}, "training", {"name": "out", "resume": "never"}, {"name": "out", "resume": "allow"}),
        ("swanlab", {"SWANLAB_PROJECT": "theirs"}, {}, "theirs", {"id": "ID", "resume": "allow"}, None),
        ("comet_ml", {"COMET_PROJECT_NAME": "theirs"}, {}, "theirs", {}, {}),
    ],
)
def test_projects_names_and_continued_runs(
    tmp_path, monkeypatch, own_tracker, name, variables, settings, project, first, again
):
    """The arguments that each tracker documents: of its start, and of that of a resumed run."""
    own = own_tracker(name)
    monkeypatch.setattr(trackers, "choose_trackers", lambda report_to: [report_to])
    monkeypatch.setattr(trackers.secrets, "token_hex", lambda _: "ID")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    accelerator: Any = SimpleNamespace(trackers=[], is_main_process=True)
    accelerator.init_trackers = lambda *_: [tracker.start() for tracker in accelerator.log_with]
    run = PretrainSettings(dataset="digits", report_to=name, output_dir=str(tmp_path / "out"), **settings)
    ids: dict[str, str] = {}
    for step in (0, 4):
        trackers.start_trackers(accelerator, run, ids, step)
    expected = [(project, first), (project, first if again is None else again)]
    assert [one.given for one in own.runs] == expected


@pytest.mark.parametrize("report_to", ["nothing", "tensorboard,nothing"])
def test_an_unknown_tracker_is_refused_before_any_work(tmp_path, report_to):
    with pytest.raises(ValueError, match="nothing"):
        pretrain(arguments(**SIX_STEPS | {"report_to": report_to}, output_dir=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_wandb_continues_its_run(tmp_path, monkeypatch):
    """Its real client, without a network: the run's folder has the identifier in its name."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_PROJECT", "flowers")
    run = SIX_STEPS | {"report_to": "wandb", "save_every": 4, "output_dir": tmp_path / "out"}
    pretrain(arguments(**run | {"steps": 4}))
    pretrain(arguments(**run, resume="true"))
    folders = [name for name in os.listdir(tmp_path / "wandb") if name.startswith("offline-run-")]
    assert len({name.rpartition("-")[2] for name in folders}) == 1
