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
import torch.distributed as dist

from hf_vit.training import stalls

from ..launching import DIGITS, LIMIT, arguments, environment, through

TIMEOUT = 8  # seconds: more than data workers take to start


@pytest.mark.parametrize("equal", [False, True])
def test_a_process_that_lives_and_does_not_come_is_named(monkeypatch, capsys, equal):
    """Where both are equally far, as while both compile, they wait."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    places = [stalls.Place(), stalls.Place()]
    for place in places[:1] if not equal else places:
        place.enter("training", 3)
    watchers = [stalls._Watcher(place, rank, 2, timeout=0.6) for rank, place in enumerate(places)]
    monkeypatch.setattr(stalls.os, "_exit", lambda status: watchers[0].over.set())
    places[1].since = time.monotonic()
    for watcher in watchers:
        watcher.start()
    said, deadline = "", time.monotonic() + 20
    while not said and time.monotonic() < deadline:
        time.sleep(0.05)
        said = capsys.readouterr().err
    if equal:
        assert "no process has moved for 0.6 s; all are at step 3 (training)" in said
        assert not watchers[0].over.is_set()
    else:
        behind = rf"rank 1 \(process {os.getpid()} on \S+\) at step 0 \(before the first step\): alive"
        assert re.search(rf"{behind}, but the others wait at step 3 \(training\)", said), said
        assert watchers[0].over.wait(5)
    for watcher in watchers:
        watcher.over.set()
        watcher.join()


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


@pytest.mark.slow
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
