"""Two real processes over gloo, one of which stops, is slow, or dies."""

import os
import signal
import time

import pytest

from ..commands import pretrain
from ..processes import DIGITS, LIMIT, ONE_STEP, arguments, code_of, finish, start

SECONDS = 4
ENDLESS = DIGITS | {"steps": 100_000, "save_every": 5, "eval_every": 100_000, "stall_timeout": SECONDS}


def wait_until(condition, what: str):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "missing", "named"),
    [
        (signal.SIGSTOP, 1, ": Rank 1 failed"),
        pytest.param(signal.SIGSTOP, 0, "rank 0", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 1, "closed", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_process_ends_the_run_and_is_named(tmp_path, number, missing, named):
    """A process that died is known to the launcher, too: gloo only sees that its connection is closed."""
    processes = start(code_of("pretrain", 2, output_dir=tmp_path / "out", **ENDLESS), 2)
    other = processes[1 - missing]
    try:
        wait_until(lambda: list((tmp_path / "out" / "checkpoints").glob("step_*")) or not other.is_running(), "steps")
        os.kill(processes[missing].pid, number)
        wait_until(lambda: not other.is_running(), "the other process waits forever")
    finally:
        for process in processes:
            process.kill()
    errors = (other.folder / "error").read_text()
    [message] = [line for line in errors.splitlines() if "--stall-timeout" in line]
    assert named in message
    assert f"--stall-timeout {SECONDS}" in message
    assert "Traceback" not in errors


SLOW = """
import os
import time
from hf_vit.training import trainer

def slow(function):
    def wait(*arguments, **options):
        if os.environ["RANK"] == "0":
            time.sleep(6)
        return function(*arguments, **options)
    return wait

trainer.evaluate_classifier = slow(trainer.evaluate_classifier)
trainer.save_merged = slow(trainer.save_merged)
"""


@pytest.mark.slow
def test_a_long_evaluation_or_save_of_one_process_does_not_end_the_run(tmp_path):
    settings = DIGITS | {"steps": 4, "warmup_steps": 1, "eval_every": 2, "save_every": 2, "stall_timeout": 3}
    finish(start(SLOW + code_of("pretrain", 2, output_dir=tmp_path / "out", **settings), 2))
    assert (tmp_path / "out" / "metrics.json").exists()


def test_data_workers_that_deliver_nothing_end_the_run(tmp_path):
    """In one process too. No worker starts and decodes within a millisecond."""
    settings = ONE_STEP | {"num_workers": 1, "stall_timeout": 0.001, "output_dir": tmp_path / "out"}
    with pytest.raises(ValueError, match="--stall-timeout"):
        pretrain(arguments(**settings))
