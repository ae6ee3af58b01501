"""Two CPU processes over gloo do what one process does."""

import json

import numpy as np
import pytest
import torch

from ..processes import DIGITS, MODEL, ONE_STEP, arguments, finish, history, launch, start, weights


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same 30 steps on one process, with one forward per step, and on two with two each.

    Nothing but the template says that the two are on CPUs.
    """
    folder = tmp_path_factory.mktemp("runs")
    settings = {**DIGITS, "steps": 30, "eval_every": 15}
    launch("pretrain", output_dir=folder / "one", **{**settings, "per_device_batch_size": 24}, num_processes=1)
    variables = {"ACCELERATE_USE_CPU": "true" if torch.accelerator.is_available() else None}
    launch("pretrain", 2, output_dir=folder / "two", **settings, num_processes=2, variables=variables)
    return folder / "one", folder / "two"


def test_same_losses_learning_rates_and_weights(runs):
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), rtol=1e-5, atol=1e-6)
    one, two = (history(folder) for folder in runs)
    assert [entry["step"] for entry in one] == [entry["step"] for entry in two]
    for name in ("loss", "learning_rate", "accuracy", "eval_loss", "eval_accuracy"):
        left, right = ([entry[name] for entry in run if name in entry] for run in (one, two))
        assert len(left) >= 2
        np.testing.assert_allclose(left, right, rtol=1e-5, err_msg=name)


def test_every_sample_is_counted_once(runs):
    for folder in runs:
        assert json.loads((folder / "metrics.json").read_text())["samples"] == 103
    settings = {"model": runs[0], "dataset": "digits", "split": "test[:103]"}
    done = launch("evaluate", 2, **settings, num_processes=2, eval_batch_size=32)
    alone = launch("evaluate", **settings, eval_batch_size=7)
    two, one = (json.loads(result.stdout) for result in (done, alone))
    assert two["samples"] == one["samples"] == 103
    assert two["accuracy"] == one["accuracy"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)


def test_few_shots_are_the_same(runs, tmp_path):
    """Each process computes the features of its images, and all of them solve the same equations."""
    settings = {"model": runs[0], "dataset": "digits", "protocol": "few_shot", "train_split": "train[:301]"}
    settings |= {"split": "test[:103]", "shots": "3,7", "seeds": 2}
    two = launch("evaluate", 2, **settings, num_processes=2, eval_batch_size=16, output_dir=tmp_path)
    one = launch("evaluate", **settings, eval_batch_size=29)
    two, one = (json.loads(result.stdout) for result in (two, one))
    assert two["samples"] == one["samples"] == 103
    for left, right in zip(two["few_shot"], one["few_shot"], strict=True):
        assert left["accuracy_of_seeds"] == pytest.approx(right["accuracy_of_seeds"], abs=0.011)  # one image
    assert two["few_shot"][1]["accuracy"] > 0.3  # chance is 0.1


def test_wrong_number_of_processes_is_refused(tmp_path):
    done = launch("pretrain", check=False, output_dir=tmp_path / "out", **DIGITS, num_processes=2)
    assert done.returncode == 2
    assert "--num-processes" in done.stderr


LACKS_MEMORY = """
import os
from hf_vit.cli.training import run_training
from hf_vit.training.objectives import Classification
from hf_vit.training.trainer import Trainer

compute, tried = Classification.__call__, []

def lack_memory(self, model, batch, rng, **sizes):
    tried.append(len(batch["image"]))
    if os.environ["RANK"] == "1" and tried[-1] > 3:
        raise RuntimeError("CUDA out of memory. Tried to allocate 99 bytes")
    return compute(self, model, batch, rng, **sizes)

Classification.__call__ = lack_memory
run_training("pretrain", {!r})
print("tried", tried)
"""


def test_processes_agree_on_a_batch_size_that_fits_on_all(tmp_path):
    """Of 24 images 12, 6 and 3 a forward are tried, and rank 1 lacks memory for more than 3."""
    settings = {**ONE_STEP, "find_batch_size": "true", "per_device_batch_size": 12, "output_dir": tmp_path / "out"}
    done = finish(start(LACKS_MEMORY.format(arguments(**settings)), 2))
    assert done.stdout.count("tried [12, 6, 3, 3, 3, 3, 3]") == 2  # a try each, and the forwards of the step


TWICE = """
import os
import hf_vit

os.chdir({folder!r})
every_run = dict(steps=2, batch_size=8, num_workers=0, report_to="none", eval_split="test[:20]")
hf_vit.pretrain("digits", "one", config={model!r}, **every_run)
metrics = hf_vit.finetune("one", "digits", "two", mixed_precision="bf16", **every_run)
print("samples", metrics["samples"], metrics["train_images_per_second"] > 0)
"""


def test_a_program_trains_twice(tmp_path):
    """The second time in another precision."""
    done = finish(start(TWICE.format(folder=str(tmp_path), model=MODEL), 2))
    assert done.stdout.count("samples 20 True") == 2
    card = json.loads((tmp_path / "two" / "card_data.json").read_text())
    assert (card["processes"], card["command"].split("(")[0]) == (2, "hf_vit.finetune")
