"""Signals that announce the end of the machine: training saves within one step, on all processes, and ends."""

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from .groups import cpu_group

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
PREEMPTED = getattr(os, "EX_TEMPFAIL", 75)  # exit status: start the same command again


class Preempted(Exception):
    """Training was told to end; it has saved and said so, and the same command with `resume` goes on."""


class Preemption:
    """Notices SIGTERM and SIGUSR1 while training runs, and has all processes notice them at the same step.

    Where there are several processes, what each has received is exchanged while a step is computed, over a process
    group of its own on the CPU: the step does not wait. Nothing is noticed outside the main thread, or by several
    processes without a process group (XLA).
    """

    def __init__(self, processes: int):
        self._received = 0
        self._group = cpu_group("preemption") if processes > 1 else None
        self._notices = processes == 1 or self._group is not None
        self._exchange: tuple[Any, torch.Tensor] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Preemption":
        if self._notices and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        self._received = number

    def begin_step(self) -> None:
        """Begin to tell the other processes what was received; every process must call it."""
        if self._group is not None:
            received = torch.tensor(self._received)
            self._exchange = dist.all_reduce(received, dist.ReduceOp.MAX, self._group, async_op=True), received

    def end_step(self) -> str | None:
        """The name of a signal that any process had received when the step began; of one process alone, by now."""
        number = self._received
        if self._exchange is not None:
            work, received = self._exchange
            work.wait()
            number = int(received)
        return signal.Signals(number).name if number else None


def leave_process_group(worker: int) -> None:
    """Take a data worker out of reach of signals to the group of its training process, which ends it itself."""
    if hasattr(os, "setsid"):
        os.setsid()
