"""Training on XLA's CPU device: what a TPU would be given, without one. `make test-xla` runs it, others skip it.

One device alone: on several, each thread compiles its graph, which on the CPU numbers the reductions of each anew, so
that the threads wait for each other until XLA ends the process.

Judged by the counters of torch_xla, and by the same run on the CPU without it.
"""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ..paths import ROOT
from ..processes import DIGITS, LIMIT, arguments, command, environment, weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch_xla") is None, reason="needs torch_xla: make test-xla"),
]

# Accumulation, clipping, a schedule, averaging; evaluated and saved first within the first three steps.
SETTINGS = {**DIGITS, "per_device_batch_size": 12, "warmup_steps": 3, "steps": 12, "optimizer": "adamw"}
SETTINGS |= {"eval_every": 2, "save_every": 2, "log_every": 100, "keep_checkpoints": 9, "num_workers": 0}
SETTINGS |= {"learning_rate": 0.003, "weight_decay": 0.1, "ema_decay": 0.9, "mixup_alpha": 0.2, "cutmix_alpha": 1.0}


def launch_on_xla(script: Path, variables: dict[str, str] | None = None, **settings) -> dict:
    """Start a script as the template says, on XLA's CPU device; return what it counted."""
    counts = Path(settings["output_dir"]).with_suffix(".json")
    variables = {"PJRT_DEVICE": "CPU", "LOCAL_RANK": "0", **(variables or {})}
    variables |= {"COMMAND": "pretrain", "COUNTS": str(counts), "ACCELERATE_USE_CPU": "false"}
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "training/accelerate/tpu.yaml"]
    line += ["--mixed_precision", "no", str(script), *arguments(**settings)]
    variables = {**environment(), **variables}
    done = subprocess.run(line, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(counts.read_text()) if counts.exists() else {}


def pretrain_on_xla(output: Path, variables: dict[str, str] | None = None, **settings) -> dict:
    return launch_on_xla(Path(__file__).with_name("counted.py"), variables, output_dir=output, **settings)


def pretrain_on_cpu(output: Path, **settings) -> None:
    variables = {**environment(), "USE_TORCH_XLA": "false"}
    subprocess.run(command("pretrain", output_dir=output, **settings), env=variables, check=True)


def compiled_after_step_3(counts: dict) -> int:
    return counts["rows"][-1]["compiled"] - counts["rows"][3]["compiled"]


def waits_of_steps(counts: dict) -> int:
    """Values that the host waited for in those steps after which nothing is evaluated or saved: every other one.

    The first step, whose batch is drawn, does not count.
    """
    rows = counts["rows"][2:]
    return sum(after["waited"] - before["waited"] for before, after in zip(rows[:-1:2], rows[1::2], strict=False))


def last_checkpoint(output: Path) -> dict[str, torch.Tensor]:
    """The weights, the optimizer's state and the averages."""
    files = (output / "checkpoints/step_00000012").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, dict]:
    output = tmp_path_factory.mktemp("xla") / "out"
    return output, pretrain_on_xla(output, **SETTINGS)


def test_nothing_is_compiled_after_the_third_step(run):
    """With all that a run does: it was evaluated and saved within the first three steps, and often afterward."""
    output, counts = run
    assert compiled_after_step_3(counts) == 0
    assert counts["rows"][3]["compiled"] > 0
    assert waits_of_steps(counts) == 0
    assert set(counts["fallbacks"]) <= {"aten::_local_scalar_dense"}  # reads a number
    assert len(list((output / "checkpoints").iterdir())) == 6


def test_the_weights_are_those_of_the_cpu(run, tmp_path):
    output, _ = run
    pretrain_on_cpu(tmp_path / "out", **SETTINGS)
    for read in (weights, last_checkpoint):
        torch.testing.assert_close(read(output), read(tmp_path / "out"), rtol=0, atol=1e-4)


def test_a_resumed_run_ends_the_same_and_waits_for_nothing(run, tmp_path):
    output, _ = run
    later = (f"step_{step:08d}" for step in (6, 8, 10, 12))
    again = shutil.copytree(output, tmp_path / "out", ignore=shutil.ignore_patterns(*later))
    counts = pretrain_on_xla(again, resume="true", **SETTINGS)
    assert len(counts["rows"]) == 8 + 1
    assert waits_of_steps(counts) == 0
    assert compiled_after_step_3(counts) == 0
    torch.testing.assert_close(weights(again), weights(output), rtol=0, atol=0)


def test_masked_patches_in_bfloat16_keep_float32_weights(tmp_path):
    """Under the variables that Accelerate sets on a TPU for bf16, which make bfloat16 of the weights as well."""
    settings = {**SETTINGS, "objective": "masked_patch_prediction", "mixup_alpha": 0, "cutmix_alpha": 0}
    settings |= {"optimizer": "sgd", "learning_rate": 0.07, "weight_decay": 0, "momentum_dtype": "bfloat16"}
    settings |= {"mixed_precision": "bf16"}
    counts = pretrain_on_xla(tmp_path / "xla", {"XLA_USE_BF16": "1", "XLA_DOWNCAST_BF16": "1"}, **settings)
    assert compiled_after_step_3(counts) == 0
    assert waits_of_steps(counts) == 0
    for name, tensor in weights(tmp_path / "xla").items():
        if tensor.any():
            assert not torch.equal(tensor, tensor.bfloat16().float()), name
    pretrain_on_cpu(tmp_path / "cpu", **settings)
    torch.testing.assert_close(weights(tmp_path / "xla"), weights(tmp_path / "cpu"), rtol=0, atol=1e-3)
    ours, theirs = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("xla", "cpu"))
    assert ours["histogram_entropy"] == pytest.approx(theirs["histogram_entropy"], abs=1e-6)


def test_finetune_as_the_template_says(run, tmp_path):
    """Low-rank adapters are merged and saved: a model that loads."""
    output, _ = run
    settings = {name: SETTINGS[name] for name in ("dataset", "eval_split", "report_to", "num_workers")}
    settings |= {"model": output, "steps": 2, "batch_size": 8, "image_size": 8, "lora_rank": 2}
    launch_on_xla(ROOT / "training/finetune.py", output_dir=tmp_path / "out", **settings)
    assert weights(tmp_path / "out").keys() == weights(output).keys()
    assert (tmp_path / "out/checkpoints/step_00000002").exists()
