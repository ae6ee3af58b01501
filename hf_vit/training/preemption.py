"""Preemption: after SIGTERM, SIGUSR1 or Ctrl-C, all processes save a checkpoint of the same step, and stop."""

import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from .launch import cpu_group

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
PREEMPTED = getattr(os, "EX_TEMPFAIL", 75)  # the exit status for temporary failures: the run can be resumed


class Preempted(Exception):
    """Training stopped after a signal, with a checkpoint saved; it can be resumed.

    Args:
        message: what was saved, and how to continue.
        status: exit status of the program.
    """

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Preemption:
    """Handler of SIGTERM, SIGUSR1 and Ctrl-C (SIGINT) during training; all processes stop at the same step.

    A second Ctrl-C raises KeyboardInterrupt at once. If SIGINT was ignored, as in a shell's
    background job, it stays ignored.

    While a step is computed, several processes exchange the signals that they received before it, over a separate
    process group on the CPU, so that the step does not wait. Signals are not handled outside the main thread, nor in
    several processes without a process group.
    """

    def __init__(self, processes: int, is_main_process: bool = True):
        self._is_main_process = is_main_process
        self._received = 0
        self._group = cpu_group("preemption") if processes > 1 else None
        self._handles_signals = processes == 1 or self._group is not None
        self._exchange: tuple[Any, torch.Tensor] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Preemption":
        if self._handles_signals and threading.current_thread() is threading.main_thread():
            is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            handled = [number for number in SIGNALS if not (number == signal.SIGINT and is_ignored)]
            self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        self._received = number
        if number == signal.SIGINT:
            signal.signal(number, self._before[signal.SIGINT])
            if self._is_main_process:  # not print, which the signal may have interrupted
                os.write(2, b"\nCtrl-C: saving a checkpoint after this step; press Ctrl-C again to stop at once\n")

    def begin_step(self) -> None:
        """Start to exchange received signals with the other processes; all processes must call it."""
        if self._group is not None:
            received = torch.tensor(self._received)
            self._exchange = dist.all_reduce(received, dist.ReduceOp.MAX, self._group, async_op=True), received

    def end_step(self) -> int | None:
        """Return a signal that any process received before `begin_step` (a single process: until now), or None."""
        number = self._received
        if self._exchange is not None:
            work, received = self._exchange
            work.wait()
            number = int(received)
        return number or None
