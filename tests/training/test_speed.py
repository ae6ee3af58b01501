"""Reported speed of a run, and the trace of its steps."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hf_vit.devices import peak_of
from hf_vit.scripts.pretrain import pretrain

from ..processes import DIGITS, arguments


@pytest.mark.parametrize(
    ("device", "tera"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla P4", None)],
)
def test_peaks_of_data_sheets(device, tera):
    assert peak_of(device) == (tera and tera * 1e12)


@pytest.mark.slow
def test_speed_is_reported_and_steps_are_traced(tmp_path, fresh_accelerator, capfd):
    settings = DIGITS | {"steps": 9, "eval_every": 9, "save_every": 9, "log_every": 3, "num_workers": 0, "profile": 2}
    pretrain(arguments(**settings | {"report_to": "tensorboard"}, output_dir=tmp_path / "out"))
    events = EventAccumulator(str(next((tmp_path / "out" / "training").rglob("*tfevents*"))))
    events.Reload()
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
