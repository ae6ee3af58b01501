"""A process that stops is named by the one that waits for it."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ..launching import DIGITS, LIMIT, arguments, environment, through

pytestmark = pytest.mark.slow

TIMEOUT = 8  # seconds: more than data workers take to start


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


def command_of(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text()


def wait_for(what: Callable[[], object], launcher: subprocess.Popen, log: Path):
    deadline = time.monotonic() + LIMIT / 2
    while not what():
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        assert launcher.poll() is None, log.read_text()[-4000:]
        time.sleep(0.1)


def test_a_stopped_process_is_named(tmp_path):
    """One of two, with a data worker, gets SIGSTOP; the other one ends soon after the timeout."""
    settings = DIGITS | {"steps": 100_000, "save_every": 20, "eval_every": 100_000, "stall_timeout": TIMEOUT}
    runs, log = tmp_path / "runs.json", tmp_path / "log"
    runs.write_text(json.dumps([["pretrain", *arguments(**settings, output_dir=tmp_path / "out")]]))
    line = through("multi_gpu", 2, runs, "--main_process_port", "0")
    with log.open("w") as file:
        launcher = subprocess.Popen(line, env=environment(), stdout=file, stderr=file, start_new_session=True)
    try:
        wait_for(lambda: list((tmp_path / "out" / "checkpoints").glob("step_*")), launcher, log)
        stopped = next(child for child in children_of(launcher.pid) if rank_of(child) == "1")
        [server] = [child for child in children_of(stopped) if "forkserver" in command_of(child)]
        assert children_of(server)  # the data worker, forked where no thread of gloo's is
        os.kill(stopped, signal.SIGSTOP)
        wait_for(lambda: "(stall_timeout)" in log.read_text(), launcher, log)
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    said = next(text for text in log.read_text().splitlines() if "(stall_timeout)" in text)
    place = rf"no progress for {TIMEOUT} s .*: rank 1 \(process {stopped} on \S+\) at step \d+ \(\w[\w ]*\)"
    assert re.search(rf"{place}: stopped or dead, and the others wait at step \d+", said), said
