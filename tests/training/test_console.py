"""The progress bar of a run, on a terminal and in a log file."""

import fcntl
import os
import re
import struct
import sys
import termios

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
