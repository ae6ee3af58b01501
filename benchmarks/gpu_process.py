"""Run a function in a separate process, so that a crash or a hang does not affect the caller.

The processes are forked from a server that has imported what they need, so that they start at once: the imports take
ten seconds, and there are a hundred rows.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

_STOP_SECONDS = 5  # wait for a killed process to end


class LeftOut(Exception):
    """Error for a row that this machine cannot measure; the message has the reason."""


class Outcome(NamedTuple):
    """Outcome of a process.

    status: "done", "left out", "failed", "timed out", or "cut off" (the caller ended first).
    result: the returned value, or the last intermediate result.
    """

    status: str
    result: dict
    reason: str = ""


Work = Callable[[dict, Callable[[dict], None]], dict]


class Processes:
    """Runner of processes, one at a time.

    Args:
        preload: modules that the server imports.
        method: "forkserver", or "spawn" if the device cannot be used after a fork.
        log: file for the output of the processes.
    """

    def __init__(self, preload: list[str], method: str, log: Path):
        self.log = log
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload(preload)

    def run(self, work: str, message: dict, limit: float, grace: float = 2, is_cut: bool = False) -> Outcome:
        """Run the function `work` ("module:function") with a message.

        Args:
            limit: seconds.
            grace: seconds between SIGTERM and SIGKILL.
            is_cut: flag: the limit is the end of the caller, not that of the row.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run, args=(work, message, theirs, str(self.log)))
        process.start()
        theirs.close()
        try:
            outcome = _listen(ours, process, time.monotonic() + limit, {})
            if outcome.status == "timed out":
                outcome = _end(process, ours, outcome, grace)
                if outcome.status != "done":
                    what = "the run's time was over" if is_cut else f"not ready after {limit:.0f} s"
                    outcome = Outcome("cut off" if is_cut else "timed out", outcome.result, what)
            return outcome
        except BaseException:  # the caller was asked to end
            process.terminate()
            process.join(grace)
            raise
        finally:
            _kill(process)


def _listen(ours: Any, process: Any, end: float, latest: dict) -> Outcome:
    """Collect messages until the process ends or the time limit is reached."""
    while True:
        ready = connection.wait([ours, process.sentinel], max(end - time.monotonic(), 0))
        if not ready:
            return Outcome("timed out", latest)
        if ours.poll():
            try:
                status, content = ours.recv()
            except EOFError:
                return _died(process, latest)
            if status == "partial":
                latest = content
            elif status == "done":
                return Outcome("done", content)
            else:
                return Outcome(status, latest, content)
        elif process.sentinel in ready:
            return _died(process, latest)


def _died(process: Any, latest: dict) -> Outcome:
    process.join(_STOP_SECONDS)
    code = process.exitcode
    how = f"signal {-code} ended it" if code is not None and code < 0 else f"exit status {code}"
    return Outcome("failed", latest, how)


def _end(process: Any, ours: Any, outcome: Outcome, grace: float) -> Outcome:
    """Ask a process to end, and collect its last messages."""
    process.terminate()
    return _listen(ours, process, time.monotonic() + grace, outcome.result)


def _kill(process: Any) -> None:
    """Kill a process and all processes that it started."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(_STOP_SECONDS)


def _run(work: str, message: dict, theirs: Any, log: str) -> None:
    """Run the function in the process: in its own process group, output to a file, result to the pipe."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(log, "a", buffering=1, encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # what the server has imported: later collections do not search it
    print(f"\n== {message.get('name', work)}", flush=True)
    theirs.send(_outcome_of(work, message, theirs))
    theirs.close()


def _outcome_of(work: str, message: dict, theirs: Any) -> tuple[str, Any]:
    module, _, function = work.partition(":")
    try:
        called: Work = getattr(__import__(module), function)
        return "done", called(message, lambda partial: theirs.send(("partial", partial)))
    except LeftOut as reason:
        return "left out", str(reason)
    except SystemExit as end:
        return "failed", f"exit status {end.code}"
    except BaseException as error:  # a row may fail in any way
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        return "failed", f"{type(error).__name__}: {first[:300]}"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
