"""Ctrl-C during training; test_resuming.py has the other signals, on several processes."""

import os
import re
import signal

from hf_vit.cli import main
from hf_vit.training.trainer import Trainer

from ..commands import pretrain
from ..processes import ONE_STEP, arguments

SHORT = {**ONE_STEP, "steps": 5, "eval_every": 5}
TRAIN_STEP = Trainer.train_step


def press(monkeypatch, times: int) -> None:
    """Press Ctrl-C a number of times within the third step."""

    def step(run, number):
        for _ in range(times if number == 2 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return TRAIN_STEP(run, number)

    monkeypatch.setattr(Trainer, "train_step", step)


def test_ctrl_c_saves_the_step_and_the_run_goes_on_from_there(tmp_path, monkeypatch, capfd):
    before = signal.getsignal(signal.SIGINT)
    settings = {**SHORT, "save_every": 5, "output_dir": tmp_path / "out"}
    press(monkeypatch, 1)
    assert main(["pretrain", *arguments(**settings)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    printed = capfd.readouterr().err.splitlines()
    assert any(re.search(r"\b3\b.*\b5\b.*--resume", line) for line in printed)
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step_00000003"]
    press(monkeypatch, 0)
    pretrain(arguments(**settings, resume="true"))
    assert "step_00000003" in capfd.readouterr().out


def test_a_second_ctrl_c_ends_at_once_and_names_the_last_checkpoint(tmp_path, monkeypatch, capfd):
    press(monkeypatch, 2)
    assert main(["pretrain", *arguments(**SHORT | {"save_every": 2, "output_dir": tmp_path / "out"})]) == 130
    last = capfd.readouterr().err.splitlines()[-1]
    assert str(tmp_path / "out" / "checkpoints" / "step_00000002") in last
    assert "--resume" in last


def test_an_ignored_ctrl_c_stays_ignored(tmp_path, monkeypatch):
    """As in a program that a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        press(monkeypatch, 1)
        pretrain(arguments(**SHORT, output_dir=tmp_path / "out"))
    finally:
        signal.signal(signal.SIGINT, before)
