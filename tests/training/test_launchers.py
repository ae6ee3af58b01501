"""Every launch template trains for five steps, on CPU processes over gloo, as one process does.

Judged by the weights of the run in one process, whose steps other tests hold to the originals. multi_cpu.yaml starts
the processes of test_distributed.py.
"""

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_vit import HfViTForMaskedPatchPrediction
from hf_vit.training import commands

from ..launching import DIGITS, LIMIT, MODEL, arguments, environment, through, weights

pytestmark = pytest.mark.slow

SHORT = {**DIGITS, "steps": 5, "warmup_steps": 1, "eval_every": 5, "save_every": 3, "num_workers": 0}
HYBRID = {**MODEL, "patch_size": 1, "image_size": 16, "stem_depths": [1], "stem_width": 32}
BIT = {"embedding_size": 32, "depths": [1, 2], "image_size": 16}
ADAMW = {"optimizer": "adamw", "adam_epsilon": 1e-3, "weight_decay": 0.1, "learning_rate": 0.01}  # 0 / 0 at 1e-8
RUNS = {
    "sgd": SHORT | {"ema_decay": 0.9, "dropout": 0.1},
    "compact": SHORT | ADAMW | {"momentum_dtype": "bfloat16", "layer_decay": 0.8, "freeze": "patch_embeddings"},
    "flexible": SHORT | {"patch_sizes": "2,4,8", "momentum_dtype": "bfloat16"},
    "hybrid": SHORT | ADAMW | {"config": json.dumps(HYBRID), "gradient_checkpointing": "true"},
    "bit": SHORT | {"config": json.dumps(BIT)},
    "masked": SHORT | {"objective": "masked_patch_prediction"},
    "lora": {name: value for name, value in SHORT.items() if name != "config"} | {"lora_rank": 2},
}


def write_runs(folder: Path, names: list[str], reference: Path | None = None) -> Path:
    """What launched.py is given: the command line of each run; those whose folder is there go on."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in names:
        settings = RUNS[name] | {"output_dir": folder / name, "resume": str((folder / name).exists()).lower()}
        settings |= {"model": (reference or folder) / "sgd"} if name == "lora" else {}
        lines.append(["finetune" if name == "lora" else "pretrain", *arguments(**settings)])
    file = folder / "runs.json"
    file.write_text(json.dumps(lines))
    return file


def copy_of_step_3(output: Path, copy: Path):
    """A run as it was when it had saved its third step."""
    shutil.copytree(output, copy)
    shutil.rmtree(copy / "checkpoints" / "step_00000005")


def finish(*lines: list[str]) -> list[str]:
    """Start command lines side by side; return what they print when they have ended well."""
    starts = [
        subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in lines
    ]
    ends = [process.communicate(timeout=LIMIT) for process in starts]
    for process, (_, errors) in zip(starts, ends, strict=True):
        assert process.returncode == 0, errors[-4000:]
    return [printed for printed, _ in ends]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launchers") / "cpu"
    printed = finish(through("cpu", 1, write_runs(folder, list(RUNS))))
    assert "NO of 1" in printed[0]
    return folder


def assert_same(folder: Path, one_process: Path, names: list[str]):
    for name in names:
        ours, theirs = weights(folder / name), weights(one_process / name)
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-5, msg=f"{name}: {key}")
        left, right = (json.loads((run / name / "metrics.json").read_text()) for run in (folder, one_process))
        assert left["samples"] == right["samples"] == 103
        if name != "masked":  # whose evaluation corrupts other patches on another number of processes
            assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
        kind = HfViTForMaskedPatchPrediction if name == "masked" else AutoModelForImageClassification
        _, info = kind.from_pretrained(folder / name, output_loading_info=True)
        assert not any(info.values()), info
        AutoImageProcessor.from_pretrained(folder / name)


def test_the_run_in_one_process_learns(one_process):
    start, end = (weights(one_process / name)["classifier.weight"] for name in ("sgd", "lora"))
    assert float((start - end).abs().max()) > 1e-3


def test_fsdp(one_process, tmp_path, fresh_accelerator):
    """From the first step, from a checkpoint of one process, and on to one process."""
    copy_of_step_3(one_process / "compact", tmp_path / "out" / "compact")
    runs = write_runs(tmp_path / "out", list(RUNS), one_process)
    printed = finish(through("fsdp", 2, runs, "--main_process_port", "0"))
    assert "FSDP of 2" in printed[0]
    assert f"Resuming from {tmp_path / 'out' / 'compact'}/checkpoints/step_00000003" in printed[0]
    assert_same(tmp_path / "out", one_process, list(RUNS))
    for name in ("sgd", "hybrid"):
        copy_of_step_3(tmp_path / "out" / name, tmp_path / "alone" / name)
        commands.pretrain(arguments(**RUNS[name], output_dir=tmp_path / "alone" / name, resume="true"))
    assert_same(tmp_path / "alone", one_process, ["sgd", "hybrid"])


def test_hsdp(one_process, tmp_path):
    """Two groups of two processes."""
    sizes = ["--parallelism_config_dp_shard_size", "2", "--main_process_port", "0"]
    printed = finish(through("hsdp", 4, write_runs(tmp_path / "out", ["compact"]), *sizes))
    assert "FSDP of 4" in printed[0]
    assert_same(tmp_path / "out", one_process, ["compact"])


def test_two_machines(one_process, tmp_path):
    """Two launchers, each with one process."""
    runs = write_runs(tmp_path / "out", ["compact"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free.getsockname()[1])]
    printed = finish(*(through("multi_node", 2, runs, *address, "--machine_rank", str(rank)) for rank in (0, 1)))
    assert "MULTI_CPU of 2" in printed[0]
    assert_same(tmp_path / "out", one_process, ["compact"])


@pytest.mark.parametrize(("template", "processes"), [("single_gpu", 1), ("multi_gpu", 2)])
def test_templates_of_one_machine(one_process, tmp_path, template, processes):
    runs = write_runs(tmp_path / "out", ["compact"])
    printed = finish(through(template, processes, runs, "--main_process_port", "0"))
    assert f"of {processes}" in printed[0]
    assert_same(tmp_path / "out", one_process, ["compact"])
