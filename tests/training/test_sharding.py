"""A model whose weights are spread over two processes: its optimisers and its checkpoints.

Judged by the same optimisers on one device, which test_optimization.py holds to optax.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from ..launching import environment

pytestmark = pytest.mark.slow


def test_sharded_optimizers_step_as_on_one_device_and_continue_exactly(tmp_path):
    script = Path(__file__).with_name("sharded_run.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launcher, str(script), str(tmp_path)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("the same weights") == 2
