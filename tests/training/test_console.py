"""The progress bar of a run, on a terminal and in a log file."""

import numpy as np
import pytest

from hf_vit.scripts.pretrain import pretrain
from hf_vit.training import console

from ..photographs import table_of
from ..processes import DIGITS, arguments

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

SHORT = {**DIGITS, "steps": 4, "warmup_steps": 0, "eval_every": 2, "num_workers": 0}


def test_a_class_that_only_the_evaluation_has_is_named_before_training(tmp_path, capsys):
    """A class without images to evaluate is not."""
    for name, labels in {"train": [0, 2, 2, 0], "test": [0, 1, 1, 0]}.items():
        data = table_of([np.zeros((8, 8), np.uint8)] * 4, labels, ["cat", "bird", "dog"])
        data.to_parquet(tmp_path / f"{name}.parquet")
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
    table_of([noise] * 4, [0, 1, 1, 0], ["cat", "dog"]).to_parquet(tmp_path / "train.parquet")
    settings = {**SHORT, "dataset": tmp_path, "eval_split": "none", "batch_size": 4, "per_device_batch_size": 4}
    pretrain(arguments(**{**settings, "steps": 8, "output_dir": tmp_path / "out"}))
    found = [record.getMessage() for record in caplog.records if record.name == "hf_vit.training.console"]
    assert len(found) == warnings
    assert all(word in message for message in found for word in ("--num-workers", "--augment-on"))
