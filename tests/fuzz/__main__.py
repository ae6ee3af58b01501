"""Mutate inputs and use them: `python -m tests.fuzz --kind npz --count 1000 --seed 0`; see CONTRIBUTING.md.

A finding is a folder with the files of its input and what happened; `--only NUMBER` repeats one in this process.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

# What the package and its caches read when they are imported.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
_SAID = 4  # findings of each verdict that are said at once; all are written


def main() -> int:
    """Run the gate; the exit status is 1 where there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", allow_abbrev=False)
    parser.add_argument("--kind", nargs="+", default=["all"], help="names of kinds; all by default")
    parser.add_argument("--count", type=int, default=1_000, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="use the input of this number here, and say what happens")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("fuzz_findings"), help="folder of the findings")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz_cache_") as cache:
        os.environ.update(_ENVIRONMENT, HF_HOME=cache, XDG_CACHE_HOME=cache)
        import torch

        from .kinds import KINDS

        torch.set_num_threads(1)
        known = {kind.name: kind for kind in KINDS}
        if unknown := [name for name in arguments.kind if name not in (*known, "all")]:
            parser.error(f"unknown kind {unknown[0]!r}; known: {', '.join(known)}")
        chosen = list(known.values()) if "all" in arguments.kind else [known[name] for name in arguments.kind]
        if arguments.only is not None:
            return _repeat(chosen[0], arguments)
        print("| kind | seed | inputs | refused | accepted | faults | slowest | peak memory |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        return int(sum([_run(kind, arguments) for kind in chosen]) > 0)


def _run(kind, arguments: argparse.Namespace) -> int:
    """Use the inputs of a kind, print a row of the table, write the findings; return their number."""
    from .gate import run

    said: Counter[str] = Counter()
    slowest, peak, start = 0.0, 0, time.monotonic()
    for outcome in run(kind, range(arguments.count), arguments.seed, arguments.workers):
        slowest, peak = max(slowest, outcome.seconds), max(peak, outcome.peak)
        said[outcome.verdict] += 1
        if outcome.is_fault:
            _report(kind, arguments, outcome, aloud=said[outcome.verdict] <= _SAID)
    faults = arguments.count - said["accepted"] - said["refused"]
    cells = (kind.name, arguments.seed, f"{arguments.count:,}", f"{said['refused']:,}", f"{said['accepted']:,}", faults)
    print("|", *(f"{cell} |" for cell in cells), f"{slowest:.1f} s | {peak / 2**20:,.0f} MiB |", flush=True)
    print(f"  {kind.name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return faults


def _report(kind, arguments: argparse.Namespace, outcome, aloud: bool) -> None:
    """Write a finding into a folder of its own, and say it in a line."""
    from .gate import case_of, write_files

    place = arguments.output / f"{kind.name}-{arguments.seed}-{outcome.number}"
    write_files(case_of(kind, arguments.seed, outcome.number), place)
    command = f"python -m tests.fuzz --kind {kind.name} --seed {arguments.seed} --only {outcome.number}"
    spent = f"{outcome.seconds:.2f} s, {outcome.peak:,} bytes above the imports"
    report = "\n".join([outcome.verdict, command, spent, outcome.text, ""])
    (place / "report.txt").write_text(report, encoding="utf-8", errors="backslashreplace")
    last = (outcome.text.strip().splitlines() or [""])[-1]
    if aloud:
        print(f"  {kind.name} {outcome.number}: {outcome.verdict}: {last[:300]!a}", file=sys.stderr, flush=True)


def _repeat(kind, arguments: argparse.Namespace) -> int:
    """Use one input in this process."""
    from .gate import case_of, try_case

    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        (Path(folder) / "shared").mkdir()
        kind.prepare(Path(folder) / "shared")
        case = case_of(kind, arguments.seed, arguments.only)
        outcome = try_case(kind, arguments.seed, arguments.only, Path(folder) / "case")
        print(case.original, outcome.verdict, outcome.text, f"{case.value!a:.999}", sep="\n")
        return int(outcome.is_fault)


if __name__ == "__main__":
    sys.exit(main())
