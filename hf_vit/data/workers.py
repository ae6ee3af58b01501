"""Start of data workers, the processes that decode and augment.

A process group (gloo, NCCL) has threads. A worker forked beside them can wait forever for a lock that a thread held.
With a process group, workers are therefore forked from a server without threads, which has imported everything once.
"""

import multiprocessing
import os
import threading
from multiprocessing import forkserver
from typing import Any

import torch.distributed as dist


def leave_process_group(worker: int) -> None:
    """Take a data worker out of its training process's group, so that signals to the group do not reach it."""
    if hasattr(os, "setsid"):
        os.setsid()


def _in_group() -> bool:
    return dist.is_initialized() and "forkserver" in multiprocessing.get_all_start_methods()


def start_server(num_workers: int) -> None:
    """Start the server of workers, if there will be one; its imports take seconds, on another core."""
    if num_workers and _in_group():
        forkserver.set_forkserver_preload(["__main__", f"{__package__}.worker_server"])
        forkserver.ensure_running()


def worker_options(num_workers: int) -> dict[str, Any]:
    """Return the arguments of a DataLoader with workers."""
    options: dict[str, Any] = {"num_workers": num_workers, "worker_init_fn": leave_process_group}
    if num_workers and _in_group():
        options |= {"multiprocessing_context": "forkserver", "worker_init_fn": _begin}
    return options


def _begin(worker: int) -> None:
    """Leave the process group, and end with the training process; the server lives as long as its workers."""
    leave_process_group(worker)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)
