"""A run on changing numbers of processes with early ends equals an undisturbed run on one process."""

from ..processes import finish, start


def test_elastic_training_equals_one_process(tmp_path):
    """SIGTERM, SIGUSR1 and SIGKILL in the middle of a save, on 2, 1, 2 and 3 processes; see elastic_run.py."""
    code = f"from pathlib import Path\nfrom tests.training.elastic_run import main\nmain(Path({str(tmp_path)!r}))"
    done = finish(start(code))
    assert "SIGTERM: " in done.stderr
    assert done.stdout.endswith("the same weights\n")
