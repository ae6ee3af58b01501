"""Detection of stalled processes, for which the others would wait forever, and of stalled data workers.

A thread in each process publishes a heartbeat and the progress in the store of the process group. After `timeout`
seconds without progress, it reads the entries of the other processes. A process without a heartbeat is stopped or dead;
a process with less progress has not reached the collective operation. A single process only watches its data workers.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..data.samplers import BatchLayout
from ..files.messages import FAILED


@dataclass
class Progress:
    """Progress of a process in its run."""

    step: int = 0
    phase: str = "before the first step"
    passed: int = 0  # number of phases entered; equal on processes with equal progress
    since: float = 0.0  # time of the last progress, in seconds of `time.monotonic`
    is_reading: bool = False  # whether it waits for images
    waited: float = 0.0  # seconds of waiting for images so far

    def enter(self, phase: str, step: int) -> None:
        """Enter the next phase; all processes enter the same phases in the same order."""
        self.step, self.phase, self.passed = step, phase, self.passed + 1
        self.since = time.monotonic()


class WatchedBatches:
    """Batches of a loader; `progress` records the waiting for them."""

    def __init__(self, batches: Any, progress: Progress):
        self.batches, self.progress = batches, progress

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict]:
        progress, batches = self.progress, iter(self.batches)
        while True:
            began = progress.since = time.monotonic()
            progress.is_reading = True
            batch = next(batches, None)
            progress.is_reading, progress.since = False, time.monotonic()
            progress.waited += progress.since - began
            if batch is None:
                return
            yield batch


@contextmanager
def watch_processes(progress: Progress, layout: BatchLayout, timeout: float) -> Iterator[None]:
    """End this process with a message that names the stalled ranks, after `timeout` seconds without progress.

    Do nothing if the timeout is 0, or if several processes have no TCP store.
    """
    if not timeout or (layout.processes > 1 and not (dist.is_initialized() and "MASTER_PORT" in os.environ)):
        yield
        return
    progress.since = time.monotonic()
    watcher = Watcher(progress, layout.rank, layout.processes, timeout)
    watcher.start()
    try:
        yield
    finally:
        watcher.over.set()
        watcher.join()


class Watcher(threading.Thread):
    """Thread that watches the other processes while the main thread waits in a collective."""

    def __init__(self, progress: Progress, rank: int, processes: int, timeout: float):
        super().__init__(name="stalls", daemon=True)
        self.progress, self.rank, self.timeout = progress, rank, timeout
        self.interval = min(timeout / 4, 5.0)
        self.over = threading.Event()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.keys = [f"hf_vit/stalls/{attempt}/{number}" for number in range(processes)]  # in the store
        if processes > 1:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self.store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=10))  # pyright: ignore
        self.heartbeat, self.warned = 0, -1

    def run(self) -> None:
        while not self.over.wait(self.interval):
            try:
                self.publish()
                if self._is_stalled:
                    self.check_processes()
            except (RuntimeError, OSError):  # torch's store raises RuntimeError
                if self._is_stalled:
                    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                    self._end(f"the TCP store at {address} does not respond: its process or machine has stopped")

    @property
    def _is_stalled(self) -> bool:
        return time.monotonic() - self.progress.since > self.timeout

    @property
    def _where(self) -> str:
        return f"step {self.progress.step} ({self.progress.phase})"

    def publish(self) -> None:
        """Publish an entry: heartbeat (a count), progress, and a description of process and step."""
        if len(self.keys) > 1:
            self.heartbeat += 1
            where = f"(process {os.getpid()} on {socket.gethostname()}) at {self._where}"
            self.store.set(self.keys[self.rank], json.dumps([self.heartbeat, self.progress.passed, where]))

    def _read(self) -> list[Any]:
        """Return the latest entry of each process."""
        return [
            json.loads(self.store.get(key)) if self.store.check([key]) else [0, 0, "before the first step"]
            for key in self.keys
        ]

    def check_processes(self) -> None:
        """End the run if a process is dead or behind the others; if all have equal progress, print a warning.

        A single process only checks its data workers.
        """
        if len(self.keys) == 1:
            if self.progress.is_reading:
                self._end(f"no batch arrived from the data loader at {self._where}")
            return
        before = self._read()
        if self.over.wait(3 * self.interval) or not self._is_stalled:
            return
        self.publish()
        after, ranks = self._read(), range(len(self.keys))
        silent = [rank for rank in ranks if rank != self.rank and after[rank][0] == before[rank][0]]
        behind = [rank for rank in ranks if after[rank][1] < self.progress.passed]
        for missing, state in ((silent, "stopped or dead, and"), (behind, "alive, but")):
            if missing:
                named = ", ".join(f"rank {rank} {after[rank][2]}" for rank in missing)
                self._end(f"{named}: {state} the others wait at {self._where}")
        if self.warned != self.progress.passed:
            self.warned = self.progress.passed
            print(f"no progress for {self.timeout:g} s; all are at {self._where}", file=sys.stderr, flush=True)

    def _end(self, why: str) -> None:
        text = f"no progress for {self.timeout:g} s (--stall-timeout): {why}. Run the same command with --resume"
        print(f"error: {text} to continue", file=sys.stderr, flush=True)
        os._exit(FAILED)  # an exception would not reach the main thread, which waits in a collective operation
