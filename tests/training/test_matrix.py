"""Kinds of runs through the launch templates, on CPU processes over gloo: each ends with the weights of one process.

All runs of a template share one launch. A run takes two steps, then resumes and takes the third; it evaluates after
each step.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.scripts.finetune import finetune

from ..launching import LIMIT, arguments, environment, through, weights
from ..tiny_models import save_tiny

pytestmark = pytest.mark.slow

EVERY_RUN = {"batch_size": 8, "per_device_batch_size": 2, "learning_rate": 0.01, "schedule": "constant"}
EVERY_RUN |= {"warmup_steps": 0, "eval_every": 1, "save_every": 1, "log_every": 1, "eval_batch_size": 4}
EVERY_RUN |= {"best_metric": "accuracy", "num_workers": 0, "report_to": "none"}
NATIVE = {"preset": "native", "token_drop": 0.3}
ADAMW = {"optimizer": "adamw", "adam_epsilon": 1e-3, "weight_decay": 0.1}  # 0 / 0 at 1e-8
KINDS = {  # settings of each kind of run
    "average": {"ema_decay": 0.5},
    "native": NATIVE,
    "average_native": {"ema_decay": 0.5, **NATIVE},
    "average_flexible": {"ema_decay": 0.5, "patch_sizes": "2,4", "best_metric": "loss"},
    "average_lora": {"ema_decay": 0.5, "lora_rank": 2, "find_batch_size": "true"},
    "average_muon": {"ema_decay": 0.5, "optimizer": "muon", "class_sampling": "balanced"},
    "compact_native": {**ADAMW, "momentum_dtype": "bfloat16", "gradient_checkpointing": "true", **NATIVE},
}
FAR = {"average_muon": 1e-3}  # Muon iterates in bfloat16, in sums of another order when sharded
NOT_BETTER = {"average", "native", "average_native"}  # only their first evaluation is a new best
TEMPLATES = {  # number of processes, and options of the launcher
    "multi_cpu": (2,),
    "fsdp": (2,),
    "hsdp": (4, "--parallelism_config_dp_shard_size", "2"),
}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Two classes of images of different sizes."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir()
        for number in range(8):
            pixels = rng.integers(0, 255, (*rng.integers(8, 60, 2), 3))
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def settings(images, tmp_path_factory) -> dict[str, dict]:
    """Settings of each kind of run, without its length and output."""
    model = save_tiny(tmp_path_factory.mktemp("model") / "tiny")
    common = {"model": model, "dataset": images, "eval_split": "train[:7]", **EVERY_RUN}
    return {name: common | changes for name, changes in KINDS.items()}


@pytest.fixture
def one_process(settings, tmp_path, fresh_accelerator) -> Path:
    for name, run in settings.items():
        finetune(arguments(**run, steps=3, output_dir=tmp_path / "one" / name))
    return tmp_path / "one"


def test_every_template_equals_one_process(settings, one_process, tmp_path):
    for template, (processes, *options) in TEMPLATES.items():
        output = tmp_path / template
        runs = {name: run for name, run in settings.items() if template == "multi_cpu" or name in NOT_BETTER}
        lines = [
            ["finetune", *arguments(**run, steps=steps, resume=steps == 3, output_dir=output / name)]
            for name, run in runs.items()
            for steps in (2, 3)
        ]
        (tmp_path / "runs.json").write_text(json.dumps(lines))
        line = through(template, processes, tmp_path / "runs.json", *options, "--main_process_port", "0")
        done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, f"{template}: {done.stderr[-4000:]}"
        for name in runs:
            ours, theirs = weights(output / name), weights(one_process / name)
            for key, tensor in theirs.items():
                torch.testing.assert_close(
                    ours[key], tensor, rtol=0, atol=FAR.get(name, 1e-5), msg=f"{template}, {name}: {key}"
                )
            left, right = (json.loads((run / name / "metrics.json").read_text()) for run in (output, one_process))
            assert left["best_step"] == right["best_step"]
            assert name not in NOT_BETTER or left["best_step"] == 1
            assert left["loss"] == pytest.approx(right["loss"], rel=FAR.get(name, 1e-5))
