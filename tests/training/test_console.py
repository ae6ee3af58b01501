"""The progress bar of a run, on a terminal and in a log file."""

import re

import datasets
import numpy as np
import pytest

from hf_vit.scripts.pretrain import pretrain
from hf_vit.training import console

from ..processes import DIGITS, arguments

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

SHORT = {**DIGITS, "steps": 4, "warmup_steps": 0, "eval_every": 2, "num_workers": 0}


def last_line(shown: str) -> str:
    """The last state of the bar."""
    return [line for line in re.split(r"[\r\n]+", shown) if "4/4" in line][-1]


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


@pytest.mark.parametrize(("seconds", "warnings"), [(0, 1), (1000, 0)])
def test_slow_data_are_reported_once(tmp_path, monkeypatch, caplog, seconds, warnings):
    """Without workers, decoding of noise takes most of the time; the first seconds do not count."""
    monkeypatch.setattr(console, "_MIN_SECONDS", seconds)
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3), dtype=np.uint8)
    rows = {"image": [noise] * 4, "label": [0, 1, 1, 0]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
    settings = {**SHORT, "dataset": tmp_path, "eval_split": "none", "batch_size": 4, "per_device_batch_size": 4}
    pretrain(arguments(**{**settings, "steps": 8, "output_dir": tmp_path / "out"}))
    found = [record.getMessage() for record in caplog.records if record.name == "hf_vit.training.console"]
    assert len(found) == warnings
    assert all(word in message for message in found for word in ("--num-workers", "--augment-on"))
