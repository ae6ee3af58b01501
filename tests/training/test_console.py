"""What a run prints and logs: warnings, its speed, and the trace of its steps."""

import json
import re
from functools import partial

import datasets
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

from hf_vit.training import console

from ..commands import pretrain
from ..photographs import table_of
from ..processes import DIGITS, ONE_STEP, arguments

CLASSES = ["cat", "bird", "dog"]
ONE_LABEL = {"train": [0, 2, 2, 0], "test": [0, 1, 1, 0]}
SEVERAL_LABELS = {"train": [[0], [0, 2], [], [2]], "test": [[0, 1], [1], [], [0]]}


@pytest.mark.parametrize("labels", [ONE_LABEL, SEVERAL_LABELS])
def test_a_class_that_only_the_evaluation_has_is_named_before_training(tmp_path, capsys, labels):
    """A class without images to evaluate is not."""
    kind = datasets.ClassLabel(names=CLASSES)
    for name, numbers in labels.items():
        feature = datasets.List(kind) if labels is SEVERAL_LABELS else kind
        data = table_of([np.zeros((8, 8), np.uint8)] * 4, numbers, feature)
        data.to_parquet(tmp_path / f"{name}.parquet")
    settings = {**ONE_STEP, "dataset": tmp_path, "eval_split": "test", "batch_size": 4, "per_device_batch_size": 4}
    pretrain(arguments(**settings, output_dir=tmp_path / "out"))
    printed = capsys.readouterr().out.splitlines()
    [warning] = [line for line in printed if line.startswith("warning")]
    [trained] = [line for line in printed if line.startswith("train ")]
    assert [name for name in CLASSES if name in warning] == ["bird"]
    assert [name for name in CLASSES if name in trained] == ["cat", "dog"]
    assert "2 classes" in trained


@pytest.mark.parametrize(
    ("columns", "labels"),
    [(80, "loss accuracy"), (100, "loss accuracy held out"), (132, "loss accuracy held out images/s")],
)
def test_the_progress_line_fits_with_ten_cells(columns, labels):
    """Of a run of half a day and 100,000 steps."""
    values = {"eval_accuracy": 0.9012, "loss": 0.1234, "data_wait": 0.1, "accuracy": 0.9531, "images_per_second": 3510}
    line = partial(tqdm.format_meter, 49_999, 100_000, 43_000, ncols=columns, bar_format=console.BAR_FORMAT)
    text = line(postfix=console.describe_progress(values, columns - len(line())))
    assert len(text) <= columns
    assert len(text.split("|")[1]) == 10
    assert re.findall("[a-z/]+[a-z/ ]*(?= [0-9])", text) == re.findall("held out|[a-z/]+", labels)


@pytest.mark.parametrize(("seconds", "warnings"), [(0, 1), (1000, 0)])
def test_slow_data_are_reported_once(tmp_path, monkeypatch, caplog, seconds, warnings):
    """Without workers, decoding of noise takes most of the time; the first seconds do not count."""
    monkeypatch.setattr(console, "_MIN_SECONDS", seconds)
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    table_of([noise] * 4, [0, 1, 1, 0], ["cat", "dog"]).to_parquet(tmp_path / "train.parquet")
    settings = {**ONE_STEP, "dataset": tmp_path, "eval_split": "none", "batch_size": 4, "per_device_batch_size": 4}
    pretrain(arguments(**settings | {"steps": 8, "output_dir": tmp_path / "out"}))
    found = [record.getMessage() for record in caplog.records if record.name == "hf_vit.training.console"]
    assert len(found) == warnings
    assert all(word in message for message in found for word in ("--num-workers", "--augment-on"))


@pytest.mark.slow
def test_speed_is_reported_and_steps_are_traced(tmp_path, capfd):
    settings = DIGITS | {"steps": 9, "eval_every": 9, "save_every": 9, "log_every": 3, "num_workers": 0, "profile": 2}
    pretrain(arguments(**settings | {"report_to": "tensorboard"}, output_dir=tmp_path / "out"))
    events = EventAccumulator(str(tmp_path / "out" / "training")).Reload()
    measured = {name: [event.value for event in events.Scalars(name)] for name in (
        "images_per_second", "data_wait", "memory_gib", "seconds_left")}  # fmt: skip
    assert all(len(values) == 3 for name, values in measured.items() if name != "seconds_left")
    assert all(0 < share < 1 for share in measured["data_wait"])
    assert measured["seconds_left"][0] > measured["seconds_left"][-1] == 0
    assert 0.05 < measured["memory_gib"][0] < 64
    shown = capfd.readouterr()
    assert str(tmp_path / "out" / "profile" / "trace.json") in shown.out
    assert "data_wait=" in shown.err
    trace = json.loads((tmp_path / "out" / "profile" / "trace.json").read_text())
    steps = {event["name"] for event in trace["traceEvents"] if str(event.get("name")).startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#5", "ProfilerStep#6"}
