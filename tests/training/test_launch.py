"""Starting a run: what the launch asks for, and memory that a step frees is kept for the next one."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_vit.settings.fields import EvaluateSettings
from hf_vit.training import launch

PROGRAM = """
import resource, sys
import torch
from hf_vit.training.launch import keep_freed_memory

if "keep" in sys.argv:
    keep_freed_memory()
for count in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.zeros(megabytes, 2**18) for megabytes in (5, 20, 70)]
    tensors.clear()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)  # pages of the last step
"""


def test_a_launch_of_another_size_than_its_groups_is_one_sentence(monkeypatch):
    """The template hsdp has 2 groups of 4 processes; Accelerate raises this for `--num_processes 2`."""

    def accelerator(**_):
        raise RuntimeError("Mesh should not be bigger than default world size 2, but found 8 ranks!")

    monkeypatch.setattr(launch, "Accelerator", accelerator)
    with pytest.raises(ValueError, match="8 ranks"):
        launch.start_accelerator(EvaluateSettings(model="model", dataset="digits"))


@pytest.mark.parametrize(
    ("variables", "device", "precision", "message"),
    [
        ({"WORLD_SIZE": "2"}, "cuda", "no", "WORLD_SIZE"),
        ({}, "cpu", "fp16", "fp16"),
        ({"ACCELERATE_USE_FSDP": "true"}, "cpu", "no", "FSDP"),
    ],
)
def test_what_accelerate_would_silently_ignore_is_refused(monkeypatch, variables, device, precision, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found: Any = SimpleNamespace(num_processes=1, distributed_type="NO", mixed_precision=precision)
    found.device = torch.device(device)
    monkeypatch.setattr(launch, "Accelerator", lambda **_: found)
    with pytest.raises(ValueError, match=message):
        launch.start_accelerator(EvaluateSettings(model="model", dataset="digits"))


@pytest.fixture
def algorithms():
    """What torch is set to; after the test it is again."""
    cudnn: Any = torch.backends.cudnn
    matmul = torch.get_float32_matmul_precision()
    allow_tf32, benchmark, is_strict = cudnn.allow_tf32, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    yield
    cudnn.allow_tf32, cudnn.benchmark = allow_tf32, benchmark
    torch.set_float32_matmul_precision(matmul)
    torch.use_deterministic_algorithms(is_strict)


@pytest.mark.usefixtures("algorithms", "fresh_accelerator")
def test_algorithms_are_chosen_by_the_settings(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    run = {"model": "model", "dataset": "digits"}
    launch.start_accelerator(EvaluateSettings(**run))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"
    launch.start_accelerator(EvaluateSettings(**run, tf32=True, cudnn_benchmark=True))
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    launch.start_accelerator(EvaluateSettings(**run, deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with pytest.raises(ValueError, match="cudnn_benchmark"):
        EvaluateSettings(**run, deterministic=True, cudnn_benchmark=True).validate()


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept(monkeypatch):
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)

    def pages(*arguments: str) -> int:
        return int(subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, check=True).stdout)

    assert pages() > 5000
    assert pages("keep") < 500
