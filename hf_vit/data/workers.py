"""Processes that read images ahead of the model: how many, how they start, and how they end."""

import multiprocessing
import os
import threading
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .devices import can_pin_memory

_CGROUP = Path("/sys/fs/cgroup")
_MOST_WORKERS = 16  # of "auto": each holds several batches in memory


def count_workers(num_workers: int | str) -> int:
    """Return the number of data workers; "auto": this process's share of the processors, less one, from 1 to 16."""
    if num_workers != "auto":
        return int(num_workers)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return min(max(count_processors() // processes - 1, 1), _MOST_WORKERS)


def count_processors() -> int:
    """Number of processors that this process may use: by its affinity and by the quota of its container."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # cgroups 2 and 1
        with suppress(OSError, ValueError):  # such as "max", without a quota
            texts = [(_CGROUP / file).read_text(encoding="ascii") for file in files]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0:
                count = min(count, max(quota // period, 1))
    return count


def leave_process_group(worker: int) -> None:
    """Take a data worker out of its training process's group, so that signals to the group do not reach it."""
    if hasattr(os, "setsid"):
        os.setsid()


def _uses_server(num_workers: int) -> bool:
    """Tell whether workers are forked from a server: a process group (gloo, NCCL) has threads."""
    return bool(num_workers) and dist.is_initialized() and "forkserver" in multiprocessing.get_all_start_methods()


def start_server(num_workers: int | str) -> None:
    """Start the forkserver of the data workers, if they use one; its imports take seconds, on another core."""
    if _uses_server(count_workers(num_workers)):
        forkserver.set_forkserver_preload(["__main__", f"{__package__}.worker_server"])
        forkserver.ensure_running()


def worker_options(num_workers: int, needs_spawn: bool = False) -> dict[str, Any]:
    """Return the arguments of a DataLoader with workers, the processes that decode and augment.

    Args:
        num_workers: their number.
        needs_spawn: threads of this process have connections, which a fork would break.

    A worker forked while threads run can deadlock on a lock that a thread held. With a process group, workers are
    therefore forked from a server without threads, which has imported everything once. Where a thread of fsspec has
    connections, which a fork breaks, they are spawned.
    """
    options: dict[str, Any] = {"num_workers": num_workers, "worker_init_fn": _init_worker}
    options["pin_memory"] = can_pin_memory()
    if _uses_server(num_workers):
        options["multiprocessing_context"] = "forkserver"
    elif num_workers and needs_spawn:
        options["multiprocessing_context"] = "spawn"
    return options


def _init_worker(worker: int) -> None:
    """Leave the process group, and end with the training process, even while waiting for the rest of a batch."""
    leave_process_group(worker)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)
