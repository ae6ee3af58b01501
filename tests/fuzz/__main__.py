"""Mutate inputs and use them: `python -m tests.fuzz --kind npz --count 1000 --seed 0`; see CONTRIBUTING.md.

A finding is a folder with the files of its input, what happened, and the command that repeats it.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

# What the package and its caches read when they are imported.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def main() -> int:
    """Run the gate; the exit status is 1 where there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", allow_abbrev=False)
    parser.add_argument("--kind", nargs="+", default=["all"], help="names of kinds; all by default")
    parser.add_argument("--count", type=int, default=1_000, help="inputs of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
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
        print("| kind | seed | inputs | refused | accepted | faults | slowest | peak memory |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
        return int(sum([_run(kind, arguments) for kind in chosen]) > 0)


def _run(kind, arguments: argparse.Namespace) -> int:
    """Use the inputs of a kind, print a row of the table, write the findings; return their number."""
    from .gate import run

    verdicts: Counter[str] = Counter()
    slowest, peak = 0.0, 0
    numbers = range(arguments.first, arguments.first + arguments.count)
    for outcome in run(kind, numbers, arguments.seed, arguments.workers):
        slowest, peak = max(slowest, outcome.seconds), max(peak, outcome.peak)
        verdicts[outcome.verdict] += 1
        if outcome.is_fault:
            _report(kind, arguments, outcome)
    faults = arguments.count - verdicts["accepted"] - verdicts["refused"]
    cells = (kind.name, arguments.seed, arguments.count, verdicts["refused"], verdicts["accepted"], faults)
    print("|", *(f"{cell} |" for cell in cells), f"{slowest:.1f} s | {peak / 2**20:,.0f} MiB |", flush=True)
    return faults


def _report(kind, arguments: argparse.Namespace, outcome) -> None:
    """Write a finding into a folder of its own, and say it in a line."""
    from .gate import case_of, write_files

    place = arguments.output / f"{kind.name}-{arguments.seed}-{outcome.number}"
    case = case_of(kind, arguments.seed, outcome.number)
    write_files(case, place)
    command = f"python -m tests.fuzz --kind {kind.name} --seed {arguments.seed} --first {outcome.number} --count 1"
    spent = f"{outcome.seconds:.2f} s, {outcome.peak:,} bytes above the imports"
    try:
        value = f"{case.value!a:.999}"
    except Exception as error:  # lists in lists; tensors that cannot be shown
        value = f"a value that raises {type(error).__name__}"
    report = "\n".join([outcome.verdict, command, spent, case.original, value, outcome.text, ""])
    (place / "report.txt").write_text(report, encoding="utf-8", errors="backslashreplace")
    last = (outcome.text.strip().splitlines() or [""])[-1]
    print(f"  {kind.name} {outcome.number}: {outcome.verdict}: {last[:300]!a}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
