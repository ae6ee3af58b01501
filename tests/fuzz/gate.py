"""The gate: worker processes that use one mutated input after the other, and a parent that watches them.

An input may be accepted or refused in one sentence. It is a fault if it raises anything else, ends the process, takes
more than `SECONDS` or `BYTES`, is accepted though it must not be, or leaves files behind. Time is the processor's, so
that a busy machine changes nothing; what only waits may do so for `_WAITING` times as long.
"""

import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from random import Random
from typing import Any

from hf_vit.files.messages import USER_ERRORS, format_error

SECONDS = 10.0  # of the processor for one input
_WAITING = 6
BYTES = 2**30  # of memory above that of the imports
_MORE_ADDRESSES = 4 * 2**30  # bytes of address space above the imports, so that the machine survives a fault
_INPUTS_PER_PROCESS = 250
OUTPUT = "output"  # what a use may leave in its folder when it ends well


@dataclass
class Case:
    """A mutated input.

    how: the mutations in words.
    files: name -> content, in the folder that it is used in.
    value: whatever else is handed over.
    expected: "any"; "same", where a checksum denies every other content: refused, or the same as an original;
        "refused".
    """

    how: str
    files: dict[str, bytes] = field(default_factory=dict)
    value: Any = None
    expected: str = "any"


class Kind(ABC):
    """A kind of input: how one is made, what a user does with it, and whether the result can be right."""

    name: str

    def prepare(self, folder: Path) -> None:  # noqa: B027 - most need none
        """Make what all cases share, once, in a folder that stays; workers are forked afterward."""

    @abstractmethod
    def make(self, random: Random) -> Case:
        """A case that depends on nothing but the random numbers."""

    @abstractmethod
    def use(self, case: Case, folder: Path) -> Any:
        """Do what users do with the files of a case, which lie in `folder`."""

    def judge(self, case: Case, result: Any) -> str | None:
        """What is wrong with the result of a case that was accepted; None for nothing."""
        return "it must be refused" if case.expected == "refused" else None


@dataclass
class Outcome:
    """What became of an input; `verdict` is "accepted", "refused" or the name of a fault."""

    number: int
    verdict: str
    text: str = ""
    seconds: float = 0.0  # of the processor
    peak: int = 0  # bytes above the imports

    @property
    def is_fault(self) -> bool:
        return self.verdict not in ("accepted", "refused")


def case_of(kind: Kind, seed: int, number: int) -> Case:
    """The case of a number."""
    return kind.make(Random(f"{kind.name} {seed} {number}"))


def write_files(case: Case, folder: Path) -> None:
    """Write the files of a case."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def run(
    kind: Kind, numbers: range, seed: int, workers: int = 2, seconds: float = SECONDS, most_bytes: int = BYTES
) -> Iterator[Outcome]:
    """Use the cases of all numbers, in worker processes; the outcomes come as they end."""
    todo = iter(numbers)
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        shared = Path(folder) / "shared"
        shared.mkdir()
        kind.prepare(shared)
        crew = [_Worker(kind, seed, Path(folder) / str(index), seconds, most_bytes) for index in range(workers)]
        try:
            while any([worker.is_busy or worker.give(next(todo, None)) for worker in crew]):
                ready = wait([worker.connection for worker in crew if worker.is_busy])
                yield from [worker.take() for worker in crew if worker.connection in ready]
        finally:
            for worker in crew:
                worker.stop()


class _Worker:
    """A forked process and what the parent knows of it."""

    def __init__(self, *arguments: Any):
        self._arguments = arguments
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(*self._arguments, theirs), daemon=False)
        self._process.start()
        theirs.close()
        self._uses, self.is_busy = 0, False

    def give(self, number: int | None) -> bool:
        """Let it use a case; False where there is none left."""
        if number is None:
            return False
        if self._uses >= _INPUTS_PER_PROCESS:
            self.stop()
            self._start()
        self._number, self._uses, self.is_busy = number, self._uses + 1, True
        self.connection.send(number)
        return True

    def take(self) -> Outcome:
        """The outcome of its case. A process that died is replaced."""
        try:
            self.is_busy = False
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            status = self._process.exitcode
            self.stop()
            self._start()
            verdict = "hang" if status in (-signal.SIGPROF, -signal.SIGALRM) else "crash"
            return Outcome(self._number, verdict, f"the process ended with {status}")

    def stop(self) -> None:
        """End the process and clear its folder."""
        self.connection.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        shutil.rmtree(self._arguments[2], ignore_errors=True)


def _work(kind: Kind, seed: int, folder: Path, seconds: float, most_bytes: int, connection: Any) -> None:
    """The worker process: one outcome for each number that comes; a signal ends it when its time is over."""
    _shield(folder)
    parent, imports = os.getppid(), _memory("VmRSS")
    limit = _memory("VmSize") + max(_MORE_ADDRESSES, 2 * most_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while True:
        while not connection.poll(5):
            if os.getppid() != parent:
                os._exit(0)
        number = connection.recv()
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, _WAITING * seconds)
        outcome = try_case(kind, seed, number, folder / "case")
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        outcome.peak = max(0, _memory("VmHWM") - imports)
        if not outcome.is_fault and outcome.peak > most_bytes:
            outcome.text = f"it took {outcome.peak / 2**20:,.0f} MiB of memory; then: {outcome.verdict} {outcome.text}"
            outcome.verdict = "memory"
        if not outcome.is_fault and (left := sorted(path.name for path in (folder / "tmp").iterdir())):
            outcome.verdict, outcome.text = "left behind", f"in the folder of temporary files: {', '.join(left)}"
        connection.send(outcome)


def _shield(folder: Path) -> None:
    """Keep a worker away from the terminal, and its temporary files in one place."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _memory(name: str) -> int:
    """A number of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def try_case(kind: Kind, seed: int, number: int, folder: Path) -> Outcome:
    """Use one case, and look at what came of it."""
    case = case_of(kind, seed, number)
    write_files(case, folder)
    before = _listing(folder)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the peak of memory begins anew
    start = time.process_time()
    try:
        result = kind.use(case, folder)
        outcome = Outcome(number, "accepted")
    except USER_ERRORS as error:
        outcome = _refusal(number, error)
    except BaseException as error:
        outcome = Outcome(number, f"traceback of {type(error).__name__}", traceback.format_exc()[-6_000:])
    outcome.seconds = time.process_time() - start
    left = _listing(folder) - before
    if outcome.verdict == "accepted":
        left = {name for name in left if name.split("/")[0] != OUTPUT}
        if (problem := _judge(kind, case, result)) is not None:
            outcome.verdict, outcome.text = "wrongly accepted", problem
    if left and not outcome.is_fault:
        outcome.verdict, outcome.text = "left behind", ", ".join(sorted(left))
    shutil.rmtree(folder)
    return outcome


def _judge(kind: Kind, case: Case, result: Any) -> str | None:
    try:
        return kind.judge(case, result)
    except Exception:
        return "".join(traceback.format_exc())[-6_000:]


def _refusal(number: int, error: BaseException) -> Outcome:
    """A refusal in one sentence; it is a fault where memory ran out, or where the sentence says nothing."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    if any(isinstance(cause, MemoryError) or "can't allocate memory" in str(cause) for cause in causes):
        return Outcome(number, "memory", "".join(traceback.format_exception(error))[-6_000:])
    sentence, kind = format_error(error), type(error).__name__
    if len(sentence) < 12 or " " not in sentence:
        return Outcome(number, "no sentence", "".join(traceback.format_exception(error))[-6_000:])
    return Outcome(number, "refused", f"{kind}: {sentence}")


def _listing(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
