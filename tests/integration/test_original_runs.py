"""Whole runs beside the originals' own training programs: 20 steps from the same weights on the same images.

The arrays were written by `main` of vit_jax/train.py and big_vision/train.py. `noise/...` is the difference between two
runs of the original whose arithmetic is ordered differently.
"""

import json
import re

import numpy as np
import pytest
from PIL import Image

import hf_vit
from hf_vit.conversion import convert, export
from hf_vit.training.trainer import Trainer

from ..comparing import read_arrays
from ..paths import GOLDENS

RUNS = GOLDENS / "training" / "runs"
ADAM = {"optimizer": "adamw", "momentum_dtype": "bfloat16", "weight_decay_convention": "jax"}
SETTINGS = {
    # run -> our settings besides those that the file states, and the largest difference of a loss
    "vit_jax_cosine": ({"recipe": "finetune_vit_jax"}, 1e-6),
    "transfer": ({"recipe": "finetune_big_vision"}, 1e-5),  # its class token has no position
    "sgd_and_decay": ({"recipe": "finetune_big_vision"}, 1e-6),
    "layer_decay_and_decay": ({"weight_decay": 0.01, "layer_decay": 0.6, **ADAM}, 2e-5),  # Adam's first steps are signs
}
RELEASED = {"LayerNorm_1": "LayerNorm_2", "Attention_0": "Attention_1", "MlpBlock_0": "MlpBlock_3"}
STATED = ("learning_rate", "max_grad_norm", "warmup_steps", "weight_decay", "weight_decay_convention", "momentum_dtype")
SAME = {
    "batch_size": 48,  # all training images, so that their order does not matter
    "steps": 20,
    "epochs": None,
    "schedule": "cosine",
    "crop": "none",
    "flip": False,
    "preset": "vit_jax",
    "image_size": 16,
    "dropout": 0.0,
    "train_split": "train",
    "eval_split": "test",
    "log_every": 1,
    "num_workers": 0,
    "report_to": "none",
}


@pytest.mark.parametrize("run", SETTINGS)
def test_losses_norms_rates_and_weights_are_the_originals(run, tmp_path, monkeypatch):
    golden = read_arrays(RUNS / f"{run}.npz")
    facts = json.loads(str(golden["facts"]))
    for split in ("train", "test"):
        for number, (image, label) in enumerate(zip(golden[f"images/{split}"], golden[f"labels/{split}"], strict=True)):
            path = tmp_path / "data" / split / facts["classes"][label] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    prefix = "initial/"
    initial = {name.removeprefix(prefix): array for name, array in golden.items() if name.startswith(prefix)}
    np.savez(tmp_path / "initial.npz", **initial)
    convert(tmp_path / "initial.npz", num_attention_heads=facts["heads"]).save(tmp_path / "model")

    steps = []
    mean_metrics = Trainer.mean_metrics
    monkeypatch.setattr(Trainer, "mean_metrics", lambda self: steps.append(mean_metrics(self)) or steps[-1])
    changes, largest = SETTINGS[run]
    stated = {name: value for name, value in facts["our_settings"].items() if name in STATED}
    metrics = hf_vit.finetune(tmp_path / "model", tmp_path / "data", tmp_path / "out", **{**SAME, **stated, **changes})

    for name, atol in (("loss", largest), ("gradient_norm", 10 * largest), ("learning_rate", 1e-8)):
        found = [step[name] for step in steps]
        np.testing.assert_allclose(found, golden[name], rtol=0, atol=atol, err_msg=name)
    assert metrics["accuracy"] == pytest.approx(golden["eval_accuracy"][-1])
    export(hf_vit.load(tmp_path / "out")[0], tmp_path / "final.npz", to="jax")
    final = read_arrays(tmp_path / "final.npz")
    compared = [name.removeprefix("final/") for name in golden if name.startswith("final/")]
    assert len(compared) == len(final)
    for name in compared:
        released = name
        if facts["original"] == "vit_jax":  # present-day Flax numbers the modules of a block by class
            released = re.sub("LayerNorm_1|Attention_0|MlpBlock_0", lambda found: RELEASED[found[0]], name)
        ours = final[released].ravel()
        if f"index/{name}" in golden:
            ours = ours[golden[f"index/{name}"]]
        np.testing.assert_allclose(ours, golden[f"final/{name}"], rtol=0, atol=max(largest, 1e-5) * 10, err_msg=name)
