"""The timeout of collective operations: a stalled process ends the run instead of letting the others wait for it."""

import re
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout

from .launch import cpu_group

_MOST_SECONDS = 30.0  # for an answer of the other processes, after an operation has timed out
_SIGNS = ("gloo/transport", "NCCL")  # in the messages of failed operations


class CollectiveTimeout:
    """Timeout of the collective operations of a run.

    Until the first step is done, while processes load, connect and compile, torch's own timeout holds. Then it is
    shortened, as in torchtitan. It is suspended where one process works and the others wait: in evaluation, while
    saving, and in the first step of each patch size, which may be compiled.

    Args:
        seconds: the timeout in training; 0: torch's own.
    """

    def __init__(self, accelerator: Accelerator, seconds: float):
        self.accelerator, self.seconds = accelerator, seconds
        self.is_short = False
        self._computed: set[Any] = set()  # patch sizes of the steps so far
        self._groups: list[Any] = []
        has_timeout = dist.is_initialized() and any(name in dist.get_backend_config() for name in ("gloo", "nccl"))
        if seconds and has_timeout:
            mesh = accelerator.torch_device_mesh
            meshed = [] if mesh is None else mesh.get_all_groups()
            self._groups = [dist.group.WORLD, cpu_group("preemption"), *meshed]
            self._answers = cpu_group("stalls")  # after a timeout, a group cannot be used any more

    def begin_step(self, patch_size: int | None) -> None:
        """Suspend the timeout in the first step of each patch size."""
        if patch_size not in self._computed:
            self._computed.add(patch_size)
            self.suspend()

    def shorten(self) -> None:
        """Apply the timeout; all processes must call it.

        They wait for each other before it, so that none waits under it for one that still works without it.
        """
        if not self.is_short and self._groups:
            self.is_short = True
            self.accelerator.wait_for_everyone()
            self._set(timedelta(seconds=self.seconds))

    def suspend(self) -> None:
        """Return to torch's own timeout."""
        if self.is_short:
            self.is_short = False
            self._set(max(default_pg_timeout, timedelta(seconds=self.seconds)))

    def _set(self, timeout: timedelta) -> None:
        for group in self._groups:
            _set_pg_timeout(timeout, group)

    def describe(self, error: RuntimeError) -> str | None:
        """Describe a failed operation and the missing process; None for an error of another kind."""
        if not self._groups or not any(sign in str(error) for sign in _SIGNS):
            return None
        return f"a process has stopped: {self._find_missing()} ({_first_sentence(error)})"

    def _find_missing(self) -> str:
        """Ask all processes for an answer: only rank 0 sees who is missing, the others see rank 0."""
        seconds = min(self.seconds, _MOST_SECONDS)
        found = []

        def ask() -> None:
            try:
                dist.monitored_barrier(self._answers, timedelta(seconds=seconds))
            except RuntimeError as error:
                found.append(_first_sentence(error))
            else:
                found.append("all processes answer")

        thread = threading.Thread(target=ask, daemon=True)  # torch waits for rank 0 without a timeout
        thread.start()
        thread.join(2 * seconds)
        return found[0] if found else "rank 0 does not answer"


def _first_sentence(error: RuntimeError) -> str:
    """Return the first sentence of torch's error, without the source file or the rank before it."""
    return re.sub(r"^(\[[^\]]*\]:? *)+", "", str(error).strip()).splitlines()[0].partition(". ")[0]
