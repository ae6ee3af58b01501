"""The progress bar of a run, on a terminal and in a log file."""

import fcntl
import os
import re
import struct
import sys
import termios

import datasets
import numpy as np
import pytest

from hf_vit.scripts.pretrain import pretrain

from ..launching import DIGITS, arguments

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

SHORT = {**DIGITS, "steps": 4, "warmup_steps": 0, "eval_every": 2, "num_workers": 0}


def last_line(shown: str) -> str:
    """The last state of the bar."""
    return [line for line in re.split(r"[\r\n]+", shown) if "4/4" in line][-1]


def test_accuracy_is_before_a_visible_bar_and_the_speed_after_it_on_a_terminal_of_100_columns(tmp_path, monkeypatch):
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        pretrain(arguments(**SHORT, output_dir=tmp_path / "out"))
        monkeypatch.undo()
        shown = os.read(reader, 2**16).decode()
    os.close(reader)
    last = last_line(shown)
    assert len(last) <= 100
    match = re.fullmatch(r"accuracy [\d.]+%, held out [\d.]+%, loss [\d.]+ \|(█+)\| 4/4 .* images/s\]\s*", last)
    assert match, last
    assert len(match[1]) >= 10


def test_a_log_file_has_every_value(tmp_path, capfd):
    pretrain(arguments(**SHORT, output_dir=tmp_path / "out"))
    last = last_line(capfd.readouterr().err)
    for name in ("data_wait", "memory_gib", "learning_rate", "gradient_norm", "eval_samples", "eval_skipped"):
        assert f" {name}=" in last


def test_a_class_that_only_the_evaluation_has_is_named_before_training(tmp_path, capsys):
    """A class without images to evaluate is not."""
    rows = {"image": [np.zeros((8, 8), np.uint8)] * 4}
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "bird", "dog"])}
    )
    for name, labels in {"train": [0, 2, 2, 0], "test": [0, 1, 1, 0]}.items():
        datasets.Dataset.from_dict({**rows, "label": labels}, features=features).to_parquet(
            tmp_path / f"{name}.parquet"
        )
    settings = {**DIGITS, "dataset": tmp_path, "eval_split": "test", "batch_size": 4, "per_device_batch_size": 4}
    pretrain(arguments(**{**settings, "steps": 1, "warmup_steps": 0, "num_workers": 0}, output_dir=tmp_path / "out"))
    [warning] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert "bird" in warning
    assert "dog" not in warning
