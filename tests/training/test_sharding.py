"""Checkpoints of a model whose weights are spread over two processes hold whole tensors, and continue exactly."""

import subprocess
import sys
from pathlib import Path

import pytest

from ..launching import environment


@pytest.mark.parametrize("momentum_dtype", ["float32", "bfloat16"])
def test_sharded_run_continues_exactly(tmp_path, momentum_dtype):
    script = Path(__file__).with_name("sharded_run.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, str(script), str(tmp_path), momentum_dtype], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("the same weights") == 2
