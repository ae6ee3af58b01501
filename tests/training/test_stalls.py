"""Messages about missing processes and readers; test_launchers.py stops one of two real processes."""

import os
import re
from threading import Event

import pytest
import torch.distributed as dist

from hf_vit.data.samplers import BatchLayout
from hf_vit.training import stalls


@pytest.mark.parametrize(
    ("is_equal", "is_alive", "expected"),
    [
        (True, True, r"0\.6 .* 3 \(training\)"),
        (False, True, r"rank 1 HERE .* 0 .* 3 \(training\)"),
        (True, False, r"rank 1 HERE .* 3 \(training\).* 3 \(training\)"),
    ],
)
def test_missing_process_is_named(monkeypatch, capsys, is_equal, is_alive, expected):
    """Two processes with equal progress, e.g. while both compile, do not end each other."""
    ended = []
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(stalls.os, "_exit", ended.append)
    processes = [stalls.Progress(), stalls.Progress()]
    for process in processes if is_equal else processes[:1]:
        process.enter("training", 3)
    waiting, other = (stalls.Watcher(process, rank, 2, timeout=0.6) for rank, process in enumerate(processes))
    waiting.publish()
    other.publish()
    waiting.progress.since = -1e9
    # While it waits, the other's thread would publish.
    monkeypatch.setattr(waiting.over, "wait", lambda seconds: other.publish() if is_alive else None)
    waiting.check_processes()
    assert re.search(expected.replace("HERE", rf"\(process {os.getpid()} on \S+\)"), capsys.readouterr().err)
    assert bool(ended) == (not is_equal or not is_alive)


def test_a_stalled_reader_of_a_single_process_is_named(monkeypatch, capsys):
    """And ends the run; a long computation, such as a compilation, does not."""
    ended, progress, timeout = Event(), stalls.Progress(), 0.1
    monkeypatch.setattr(stalls.os, "_exit", lambda status: ended.set())
    with stalls.watch_processes(progress, BatchLayout(4, 4), timeout):
        progress.enter("training", 3)
        assert not ended.wait(4 * timeout)
        batches = stalls.WatchedBatches((ended.wait(30) for _ in range(1)), progress)
        assert list(batches) == [True]
    assert re.search(r"\b3\b", capsys.readouterr().err)
    assert progress.waited > timeout
