"""What a process says of those it waits for; test_launchers.py stops one of two for real."""

import os
import re
import time

import pytest
import torch.distributed as dist

from hf_vit.training import stalls


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
