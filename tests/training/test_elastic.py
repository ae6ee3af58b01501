"""A run on changing numbers of processes with early ends equals an undisturbed run on one process."""

import subprocess
import sys

import pytest

from ..launching import LIMIT, environment

pytestmark = pytest.mark.slow


def test_elastic_training_equals_one_process(tmp_path):
    """SIGTERM, SIGUSR1 and SIGKILL in the middle of a save, on 2, 1, 2 and 3 processes; see elastic_run.py."""
    line = [sys.executable, "-m", "tests.training.elastic_run", str(tmp_path)]
    done = subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "SIGTERM: training has saved step" in done.stderr
    assert done.stdout.endswith("the same weights\n")
