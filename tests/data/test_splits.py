"""Default evaluation images: an existing split, or a tenth of each class."""

import json
from itertools import chain, repeat

import datasets
import numpy as np
import pytest
from PIL import Image

from hf_vit.data.sources import load_split
from hf_vit.data.splits import Split, split_off_holdout
from hf_vit.scripts.pretrain import pretrain
from hf_vit.training.build import open_splits
from hf_vit.training.settings import FinetuneSettings
from hf_vit.training.trainer import Trainer, TrainingStopped

from ..launching import DIGITS, arguments

COUNTS = {"ants": 31, "bees": 20, "wasps": 4}


def write_images(folder, counts):
    for kind, count in counts.items():
        (folder / kind).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (9, 7), (number, 0, 0)).save(folder / kind / f"{number}.png")


@pytest.mark.parametrize("name", ["val", "valid", "validation", "dev", "test"])
def test_existing_split_is_found(tmp_path, name):
    write_images(tmp_path / "train", {"ants": 3, "bees": 2})
    write_images(tmp_path / name, {"ants": 2, "bees": 2})
    settings = FinetuneSettings(dataset=str(tmp_path), model="model")
    split, eval_split = open_splits(settings)
    assert (len(split), len(eval_split)) == (5, 4)
    assert len(load_split(str(tmp_path), f"{name}[:3]")) == 3  # by its own name
    assert settings.eval_split == ("test" if name == "test" else "validation")  # as `datasets` calls it


def test_a_tenth_of_each_class_is_held_out(tmp_path):
    write_images(tmp_path, COUNTS)
    settings = FinetuneSettings(dataset=str(tmp_path), model="model")
    split, held_out = open_splits(settings)
    seen = [{row["image"]["path"] for row in part.samples} for part in (split, held_out)]
    assert not seen[0] & seen[1]
    assert len(seen[0] | seen[1]) == sum(COUNTS.values())
    labels = [held_out.label(row) for row in held_out.samples]
    assert np.bincount(labels, minlength=3).tolist() == [3, 2, 0]
    again, _ = open_splits(settings)
    assert [row["image"]["path"] for row in again.samples] == [row["image"]["path"] for row in split.samples]
    assert settings.eval_split == "auto"


@pytest.mark.parametrize(("count", "held_out"), [(9, None), (10, 1), (12, 1)])
def test_few_images(count, held_out):
    names = ["a", "b", "c", "d"]
    features = datasets.Features({"image": datasets.Value("int64"), "label": datasets.ClassLabel(names=names)})
    rows = {"image": list(range(count)), "label": [number % 4 for number in range(count)]}
    samples = datasets.Dataset.from_dict(rows, features=features)
    train, test = split_off_holdout(Split(samples, "image", "label", names, 4))
    assert (None if test is None else len(test)) == held_out
    assert len(train) + (held_out or 0) == count


def test_a_run_is_announced_and_concluded(tmp_path, capsys):
    metrics = pretrain(
        arguments(**{**DIGITS, "steps": 2, "warmup_steps": 0, "eval_split": "auto", "output_dir": tmp_path / "out"})
    )
    said = capsys.readouterr().out
    assert "train     digits, train: 1,437 images of 10 classes (0, 1, 2, 3, ...)\n" in said
    assert "evaluate  digits, test: 360 images\n" in said
    assert f"length    2 optimiser steps of {DIGITS['batch_size']} images" in said
    assert f"result    {tmp_path / 'out'}\n" in said
    assert f"accuracy {metrics['accuracy']:.2%} on 360 held-out images; best {metrics['best']:.2%} after step" in said
    assert metrics["best_step"] in (1, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"eval_split": "none", "best_metric": "loss"},
            r"best_metric \(loss\) needs held-out images: set --eval-split",
        ),
        ({"best_metric": "acuracy"}, "best_metric is 'acuracy'; it must be loss, accuracy, .*did you mean accuracy"),
        ({"best_metric": "accuracy/ten"}, "best_metric is 'accuracy/ten'; it must be loss, .*, accuracy/CLASS"),
    ],
)
def test_settings_that_no_evaluation_serves_are_refused_before_the_first_step(tmp_path, changes, message):
    """The same folder is then free for another try."""
    settings = {**DIGITS, "num_workers": 0, "steps": 2, "warmup_steps": 0, "output_dir": tmp_path / "out", **changes}
    with pytest.raises(ValueError, match=message):
        pretrain(arguments(**settings))
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_run_without_evaluation_has_no_best(tmp_path, capsys):
    """metrics.json is JSON as other programs read it, too."""
    settings = {**DIGITS, "num_workers": 0, "steps": 1, "warmup_steps": 0, "eval_split": "none"}
    assert pretrain(arguments(**settings, output_dir=tmp_path / "out"))["best"] is None
    json.loads((tmp_path / "out" / "metrics.json").read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("missing", [None, -1])
def test_images_without_labels_are_refused(tmp_path, missing):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    labels = {"train": [0, 1, 1, 0], "test": [0, missing, 1, missing]}
    for name, numbers in labels.items():
        rows = {"image": [np.zeros((9, 9, 3), np.uint8)] * 4, "label": numbers}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / f"{name}.parquet")
    for changes in ({}, {"train_split": "test", "eval_split": None}):
        with pytest.raises(
            ValueError, match=r"2 of 4 images of test have no label \(expected class numbers from 0 to 1"
        ):
            open_splits(FinetuneSettings(dataset=str(tmp_path), model="model", **changes))
    split, _ = open_splits(FinetuneSettings(dataset=str(tmp_path), model="model", eval_split=None))
    assert split.class_numbers().tolist() == labels["train"]


def test_early_stopping(tmp_path, capsys, monkeypatch):
    """The metrics are invented; the second evaluation is the best."""
    losses = chain([3.0, 1.0, 2.0, 2.5, 2.2], repeat(0.5))
    made_up = lambda trainer: {"loss": next(losses), "accuracy": 0.5, "samples": 9}  # noqa: E731
    monkeypatch.setattr(Trainer, "evaluate", made_up)
    settings = {**DIGITS, "steps": 12, "warmup_steps": 0, "eval_every": 2, "save_every": 50, "num_workers": 0}
    settings |= {"best_metric": "loss", "early_stopping": 3, "output_dir": tmp_path / "out"}
    metrics = pretrain(arguments(**settings))
    assert (metrics["best_step"], metrics["best"], metrics["best_metric"]) == (4, 1.0, "loss")
    ended = "training ends at step 10 of 12: 3 evaluations in a row were no better than that of step 4\n"
    said = capsys.readouterr().out
    assert ended in said
    assert "accuracy 50.00% on 9 held-out images; best loss 1 after step 4, in" in said
    again = pretrain(arguments(**settings, resume="true"))  # nothing more to do, and 0.5 is what the model has
    assert again["best_step"] == 4
    settings |= {"best_metric": "accuracy/3", "overwrite": "true"}
    with pytest.raises(TrainingStopped, match="accuracy/3"):
        pretrain(arguments(**settings))
