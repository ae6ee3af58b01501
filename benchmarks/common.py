"""Shared parts of the benchmarks: turns, separate processes, description of the machine, and result files.

A benchmark starts itself again in a separate process for each measurement. That process prints its result as one line
of JSON. The first process loads no model; it collects the lines.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
_RESULTS_PAGE = HERE / "RESULTS.md"
_PACKAGES = "hf_vit torch transformers timm torchvision vit-pytorch jax flax numpy openvino onnxruntime".split()
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")

_Turns = dict[str, list[float]]  # contestant: its seconds in every round


# Time


def take_turns(
    contestants: Mapping[str, Callable[[], object]],
    seconds: float = 0,
    least: int = 7,
    most: int = 200,
    warm_up: int = 2,
    pause: float = 0,
) -> _Turns:
    """Call the contestants in turn, so that other load on the machine affects them equally.

    The order changes from round to round, because a contestant affects the next one (caches, running threads).

    Args:
        seconds: duration; at least `least` and at most `most` rounds are run.
        warm_up: number of rounds before the timed ones.
        pause: seconds to wait, followed by a call that is not timed, before each timed one. ONNX Runtime's threads keep
            the cores busy for about 50 ms after a call, which slows the next contestant.
    """
    for _ in range(warm_up):
        for contestant in contestants.values():
            contestant()
    turns: _Turns = {name: [] for name in contestants}
    end = time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    try:
        for number in range(max(least, most)):
            if number >= least and time.perf_counter() > end:
                break
            for name in random.Random(number).sample(list(contestants), len(contestants)):
                if pause:
                    time.sleep(pause)
                    contestants[name]()
                turns[name].append(seconds_of(contestants[name]))
    finally:
        gc.enable()
    return turns


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def quartiles(values: list[float]) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def speed_up(turns: _Turns, ours: str, theirs: str) -> dict:
    """Return the speed-up of `ours`: the ratio of the medians, and the quartiles of the ratios of each round."""
    pairs = [their / our for our, their in zip(turns[ours], turns[theirs], strict=True)]
    ratio = statistics.median(turns[theirs]) / statistics.median(turns[ours])
    return {"against": theirs, "ratio": ratio, "pair_quartiles": quartiles(pairs)}


def fastest(turns: _Turns, among: Iterable[str]) -> str | None:
    """Return the contestant with the lowest median; None if none of them took part."""
    present = [name for name in among if name in turns]
    return min(present, key=lambda name: statistics.median(turns[name]), default=None)


class Aim(NamedTuple):
    """Aim: the fastest of `ours` is at least `ratio` times as fast as the fastest of `against`."""

    ours: str | tuple[str, ...]
    against: tuple[str, ...]
    ratio: float


def aims_table(measured: Iterable[tuple[str, _Turns, list[Aim]]]) -> str:
    """Return a Markdown table for (name of the work, turns, aims); aims without contestants are omitted."""
    rows = []
    for name, turns, aims in measured:
        for entry, against, ratio in aims:
            ours, peer = fastest(turns, (entry,) if isinstance(entry, str) else entry), fastest(turns, against)
            if peer is not None and ours is not None:
                rows.append([name, ours, peer, _ratio_text(speed_up(turns, ours, peer)), f"{ratio:g}"])
    return table(["work", "ours", "fastest peer", "times as fast (quartiles)", "aim"], rows)


def _ratio_text(speed_up: dict) -> str:
    low, _, high = speed_up["pair_quartiles"]
    return f"{speed_up['ratio']:.2f} ({low:.2f} to {high:.2f})"


def milliseconds_text(seconds: list[float]) -> str:
    low, median, high = (1000 * value for value in quartiles(seconds))
    return f"{median:.1f} ({low:.1f} to {high:.1f})"


# Memory, and separate processes


def peak_mib() -> float:
    """Return the peak resident memory of this process in MiB.

    On Linux `ru_maxrss` is unsuitable: in a new process it starts with the memory of the parent.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return int(status.split("VmHWM:")[1].split()[0]) / 2**10


def memory_text(measured: dict | None) -> str:
    """Describe the memory of a process: its peak, and the increase after the imports."""
    if measured is None:
        return ""
    return f"{measured['peak_mib']:.0f} ({measured['peak_mib'] - measured['imports_mib']:.0f})"


class Failed(Exception):
    """Error of a process that ended without a result; the message is its last line of output."""


def run_python(*arguments: object) -> str:
    """Run Python with these arguments, without the Hub; return its output."""
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment)
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout


def run_apart(program: str | Path, *arguments: object) -> dict:
    """Run a Python program; return the last line of its output, parsed as JSON."""
    return json.loads(run_python(program, *arguments).splitlines()[-1])


def print_result(work: Callable[[argparse.Namespace], dict], options: argparse.Namespace) -> None:
    """Do the work of a process that `run_apart` started: with the libraries ready, print its result."""
    use_threads(options.threads)
    silence_torchvision()
    print(json.dumps(work(options)))


def report_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# The machine


def use_threads(count: int) -> None:
    """Limit threads and processors for all contestants; JAX uses all processors of its process.

    Call this before torch and JAX are imported.
    """
    os.environ["OMP_NUM_THREADS"] = str(count)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def silence_torchvision() -> None:
    """Make a torchvision built for CUDA importable with a CPU torch, without its compiled operators.

    Call this before transformers is imported: it assumes that an installed torchvision works.
    """
    for name in ("_meta_registrations", "_autograd_registrations"):
        sys.modules.setdefault(f"torchvision.{name}", types.ModuleType(name))


def _describe_machine() -> dict:
    """Describe the machine and the versions; only results with the same description are compared."""
    import torch

    name, flags = _processor()
    return {
        "processor": name,
        "flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {
            package: importlib.metadata.version(package)
            for package in _PACKAGES
            if find_spec(package.replace("-", "_"))
        },
        "torch": [line.strip() for line in torch.__config__.parallel_info().splitlines() if line.strip()],
    }


def _processor() -> tuple[str, set[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), set()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return facts.get("model name", platform.machine()), set(facts.get("flags", facts.get("Features", "")).split())


def stamp() -> dict:
    """Return date, machine and versions, which are stored with every result."""
    return {"date": date.today().isoformat(), "load": os.getloadavg()[0], "machine": _describe_machine()}


def machine_as_markdown(results: dict[str, dict]) -> str:
    """Return a paragraph about the machine that produced the results."""
    machine = next(iter(results.values()))["machine"]
    dates = sorted({result["date"] for result in results.values()})
    loads = [result["load"] for result in results.values()]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if name != "hf_vit")
    return (
        f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} on {machine['processor']} "
        f"({', '.join(machine['flags']) or 'no vector flags known'}), {machine['threads']} threads, load at the start "
        f"{min(loads):.1f} to {max(loads):.1f}; Python {machine['python']}, {versions}."
    )


# Result files


def parser_of(description: str | None, **defaults: object) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--threads", type=int, default=processors(), help="number of threads and processors (default: all)"
    )
    parser.add_argument("--write", action="store_true", help="keep the figures in benchmarks/results and RESULTS.md")
    parser.set_defaults(**defaults)
    return parser


def publish(
    name: str,
    measured: Iterable[tuple[str, dict]],
    as_markdown: Callable[[dict[str, dict]], str],
    write: bool,
    page: Path = _RESULTS_PAGE,
) -> None:
    """Print all results at the end; with `write`, save each result at once and update the page's section.

    Args:
        measured: iterator of (name of the work, result).
    """
    results: dict[str, dict] = {}
    for work, result in measured:
        results[work] = result
        if write:
            results = keep(HERE / "results" / f"{name}.json", {work: result})
    markdown = as_markdown(results) if results else "Nothing was measured."
    print(markdown)
    if write and results:
        update_section(page, name, markdown)


def keep(path: Path, results: dict[str, dict]) -> dict[str, dict]:
    """Add results to a file; delete results of another machine or other versions."""
    machine = next(iter(results.values()))["machine"]
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = {name: result for name, result in kept.items() if result["machine"] == machine} | results
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return kept


def update_section(page: Path, name: str, text: str) -> None:
    """Replace the text between the two marks of a section; the page must have the marks."""
    begin, end = f"<!-- {name}: made by the benchmark -->", f"<!-- end of {name} -->"
    before, begins, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ends, after = rest.partition(end)
    if not begins or not ends:
        raise SystemExit(f"cannot update {page}: it has no section between {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
