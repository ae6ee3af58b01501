"""A process that stops is named by the one that waits for it."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ..launching import DIGITS, LIMIT, arguments, environment, through

pytestmark = pytest.mark.slow


def children_of(process: int) -> list[int]:
    """Ids of the processes that a process started."""
    return [
        child
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in map(int, (task / "children").read_text().split())
    ]


def rank_of(process: int) -> str:
    entries = Path(f"/proc/{process}/environ").read_text().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries).get("RANK", "")


@pytest.mark.parametrize("rank", [1])
def test_a_stopped_process_is_named(tmp_path, rank):
    """It gets SIGSTOP after the first checkpoint; the other one ends within seconds of the timeout."""
    settings = DIGITS | {"steps": 100_000, "save_every": 20, "eval_every": 100_000, "stall_timeout": 3}
    runs = tmp_path / "runs.json"
    runs.write_text(json.dumps([["pretrain", *arguments(**settings, output_dir=tmp_path / "out")]]))
    log = tmp_path / "log"
    line = through("multi_gpu", 2, runs, "--main_process_port", "0")
    with log.open("w") as file:
        launcher = subprocess.Popen(line, env=environment(), stdout=file, stderr=file, start_new_session=True)
    try:
        deadline = time.monotonic() + LIMIT / 2
        while not list((tmp_path / "out" / "checkpoints").glob("step_*")):
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            assert launcher.poll() is None, log.read_text()[-4000:]
            time.sleep(0.1)
        stopped = next(child for child in children_of(launcher.pid) if rank_of(child) == str(rank))
        os.kill(stopped, signal.SIGSTOP)
        while "error: no progress for 3 s (stall_timeout)" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.1)
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    said = next(text for text in log.read_text().splitlines() if "stall_timeout" in text)
    place = rf"rank {rank} \(process {stopped} on \S+\) at step \d+ \(\w[\w ]*\)"
    assert re.search(rf"{place}: stopped or dead, and the others wait at step \d+", said), said
