"""The gate: forked processes that use one mutated input after the other, and a parent that says what became of each.

An input may be accepted or refused in one sentence. It is a fault if it raises anything else, ends the process, takes
more than `SECONDS` or `BYTES`, is accepted though it must not be, or leaves files behind. Time is the processor's, so
that a busy machine changes nothing; what only waits may do so for `_WAITING` times as long.
"""

import json
import os
import resource
import shutil
import signal
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from hf_vit.files.messages import USER_ERRORS, format_error

from ..processes import memory

SECONDS = 10.0  # of the processor for one input
_WAITING = 6
BYTES = 2**30  # of memory above that of the imports
_MORE_ADDRESSES = 4 * 2**30  # bytes of address space above the imports, so that the machine survives a fault
_INPUTS_PER_PROCESS = 250
OUTPUT = "output"  # what a use may leave in its folder when it ends well


@dataclass
class Case:
    """A mutated input.

    original: the name of the input that was mutated.
    files: name -> content, in the folder that it is used in.
    value: whatever else is handed over.
    expected: "any"; "same", where a checksum denies every other content: refused, or the same as an original.
    """

    original: str
    files: dict[str, bytes] = field(default_factory=dict)
    value: Any = None
    expected: str = "any"


class Kind(ABC):
    """A kind of input: how one is made, what a user does with it, and whether the result can be right."""

    name: str

    def prepare(self, folder: Path) -> None:  # noqa: B027 - most need none
        """Make what all cases share, once, in a folder that stays; processes are forked afterward."""

    @abstractmethod
    def make(self, random: Random) -> Case:
        """A case that depends on nothing but the random numbers."""

    @abstractmethod
    def use(self, case: Case, folder: Path) -> Any:
        """Do what users do with the files of a case, which lie in `folder`."""

    @abstractmethod
    def judge(self, case: Case, result: Any) -> str | None:
        """What is wrong with the result of a case that was accepted; None for nothing."""


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
    return kind.make(Random(f"{kind.name} {seed} {number}"))


def write_files(case: Case, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def run(
    kind: Kind, numbers: range, seed: int, workers: int = 2, seconds: float = SECONDS, most_bytes: int = BYTES
) -> Iterator[Outcome]:
    """Use the cases of all numbers in forked processes, and return the outcomes as these end."""
    size = min(_INPUTS_PER_PROCESS, -(-len(numbers) // workers))
    todo, running = [numbers[start : start + size] for start in range(0, len(numbers), size)], {}
    with tempfile.TemporaryDirectory(prefix="fuzz_") as name:
        folder = Path(name)
        (folder / "shared").mkdir()
        kind.prepare(folder / "shared")
        try:
            while todo or running:
                while todo and len(running) < workers:
                    part = todo.pop(0)
                    running[_fork(kind, seed, part, folder, seconds, most_bytes)] = part
                pid, status = os.wait()
                part = running.pop(pid)
                lines = (folder / f"{pid}.jsonl").read_text().splitlines()
                outcomes = [Outcome(**json.loads(line)) for line in lines]
                if len(outcomes) < len(part):  # it died in the next one
                    status = os.waitstatus_to_exitcode(status)
                    verdict = "hang" if status in (-signal.SIGPROF, -signal.SIGALRM) else "crash"
                    outcomes.append(Outcome(part[len(outcomes)], verdict, f"the process ended with {status}"))
                    todo += [part[len(outcomes) :]] if len(outcomes) < len(part) else []
                yield from outcomes
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _fork(kind: Kind, seed: int, numbers: range, folder: Path, seconds: float, most_bytes: int) -> int:
    """Start a process that writes a line for each number; a signal ends it when the time of a case is over."""
    if pid := os.fork():
        return pid
    try:
        with open(folder / f"{os.getpid()}.jsonl", "w") as lines:
            own, limit = folder / str(os.getpid()), memory("VmSize") + max(_MORE_ADDRESSES, 2 * most_bytes)
            _shield(own / "tmp")
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            imports = memory("VmRSS")
            for number in numbers:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                signal.setitimer(signal.ITIMER_REAL, _WAITING * seconds)
                outcome = try_case(kind, seed, number, own / "case")
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
                outcome.peak = max(0, memory("VmHWM") - imports)
                if not outcome.is_fault and outcome.peak > most_bytes:
                    outcome.verdict, outcome.text = "memory", f"then: {outcome.verdict} {outcome.text}"
                if not outcome.is_fault and (left := sorted(path.name for path in (own / "tmp").iterdir())):
                    outcome.verdict, outcome.text = "left behind", f"in the folder of temporary files: {left}"
                print(json.dumps(asdict(outcome)), file=lines, flush=True)
        shutil.rmtree(own)
    finally:
        os._exit(1)


def _shield(temporary: Path) -> None:
    """Keep a process away from the terminal, and its temporary files in one place."""
    temporary.mkdir(parents=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def try_case(kind: Kind, seed: int, number: int, folder: Path) -> Outcome:
    """Use one case, and look at what came of it."""
    case = case_of(kind, seed, number)
    write_files(case, folder)
    before = set(folder.rglob("*"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    start, result = time.process_time(), None
    try:
        result = kind.use(case, folder)
        outcome = Outcome(number, "accepted")
    except USER_ERRORS as error:
        outcome = _refusal(number, error)
    except BaseException as error:
        outcome = Outcome(number, f"traceback of {type(error).__name__}", traceback.format_exc()[-6_000:])
    outcome.seconds = time.process_time() - start
    left = {path.relative_to(folder).as_posix() for path in set(folder.rglob("*")) - before}
    if outcome.verdict == "accepted":
        left = {name for name in left if name.split("/")[0] != OUTPUT}
        try:
            problem = kind.judge(case, result)
        except Exception:
            problem = traceback.format_exc()[-6_000:]
        if problem is not None:
            outcome.verdict, outcome.text = "wrongly accepted", problem
    if left and not outcome.is_fault:
        outcome.verdict, outcome.text = "left behind", ", ".join(sorted(left))
    shutil.rmtree(folder)
    return outcome


def _refusal(number: int, error: BaseException) -> Outcome:
    """A refusal in one sentence; it is a fault where memory ran out, or where the sentence says nothing."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    trace, sentence = "".join(traceback.format_exception(error))[-6_000:], format_error(error)
    if any(isinstance(cause, MemoryError) or "can't allocate memory" in str(cause) for cause in causes):
        return Outcome(number, "memory", trace)
    if len(sentence) < 12 or " " not in sentence:
        return Outcome(number, "no sentence", trace)
    return Outcome(number, "refused", f"{type(error).__name__}: {sentence}")
