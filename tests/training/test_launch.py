"""Starting a run: what the launch asks for, and memory that a step frees is kept for the next one."""

import platform
import subprocess
import sys

import pytest

from hf_vit.training import launch
from hf_vit.training.recipes import SettingsError
from hf_vit.training.settings import EvaluateSettings

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
    with pytest.raises(SettingsError, match="8 ranks"):
        launch.start_accelerator(EvaluateSettings(model="model", dataset="digits"))


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept(monkeypatch):
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)

    def pages(*arguments: str) -> int:
        return int(subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, check=True).stdout)

    assert pages() > 5000
    assert pages("keep") < 500
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    assert pages("keep") > 5000, "who sets glibc's variables has decided"
