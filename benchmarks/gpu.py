"""Benchmarks of one GPU within a limited time: speed, memory, losses, images, and a row of the paper.

    python benchmarks/gpu.py [--minutes 25] [--resume] [--weights FOLDER --cifar10 FOLDER]
    python benchmarks/gpu.py --device cpu --toy

The first rows are training runs from image files: the loop, an exact resume, the CPU against the GPU, fp16, FSDP2. Then
come inference, images, training steps and the peaks of products, with settings (eager, compiled, CUDA graphs,
max-autotune, padded tokens, fp8 and others) for B/16, S/16 and L/16, the most useful first. Each row runs in a separate
process with a time limit. Its result is written to OUTPUT/results.jsonl at once. When the time is over, or on SIGTERM
or Ctrl+C, the tables of the measured rows are printed and written to OUTPUT/tables.md. `--resume` continues an earlier
run, so that a GPU can be used in short sessions (`--resume --minutes 9`).

Nothing is downloaded. Rows that need a missing package (torchao, kernels, torchvision, datasets) are omitted, with the
reason.
"""

import argparse
import importlib.util
import os
import signal
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "transformers", "accelerate", "safetensors", "numpy", "PIL", "yaml", "tqdm", "jinja2", "filelock")
_SPARE_SECONDS = 5  # reserved for the tables
_PRELOAD = ["torch._dynamo", "torch._functorch.aot_autograd", "gpu_steps", "gpu_images", "gpu_paper", "gpu_runs"]
_WORK = {
    "run": "gpu_runs:measure",
    "peak": "gpu_steps:measure_peaks",
    "train": "gpu_steps:train",
    "infer": "gpu_steps:infer",
    "images": "gpu_images:measure",
    "paper": "gpu_paper:finetune",
}


class _Told(BaseException):
    """Exception for SIGTERM or Ctrl+C."""


def main(argv: list[str] | None = None) -> int:
    """Measure; the exit status is 0, 2 if no row can start, or 128 plus the number of a signal."""
    options = parse_arguments(argv)
    sys.path[:0] = [str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")))
    )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # without it, imports can initialize CUDA, which breaks forks
    from gpu_rows import ladder

    rows = [
        row
        for row in ladder(options.toy, options.inductor)
        if not options.only or any(text in row.name for text in options.only)
    ]
    if options.list:
        print("\n".join(row.name for row in rows))
        return 0
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return _refuse(f"{sys.executable} has no {', '.join(missing)}; install them, or use another Python")
    return _measure(options, rows)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--toy", action="store_true", help="use tiny models and few steps, to test the program")
    parser.add_argument("--inductor", action="store_true", help="also compile at toy size (minutes; needs g++)")
    parser.add_argument("--minutes", type=float, default=25, help="time for all rows (default 25)")
    parser.add_argument("--resume", action="store_true", help="skip what OUTPUT has measured already")
    parser.add_argument("--output", type=Path, default=Path("gpu_output"), help="folder (default gpu_output)")
    parser.add_argument("--weights", type=Path, help="ViT for the paper's row: a folder, or an original .npz")
    parser.add_argument("--cifar10", type=Path, help="folder of CIFAR-10 for the paper's row")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="rows whose names contain one of these")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--write", action="store_true", help="also write the tables to benchmarks/RESULTS.md")
    parser.add_argument("--start", choices=["forkserver", "spawn"], default="forkserver", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.minutes <= 0:
        parser.error(f"--minutes is {options.minutes:g} (expected more than 0)")
    return options


def _refuse(why: str) -> int:
    print(f"error: cannot measure: {why}", file=sys.stderr)
    return 2


def _measure(options: argparse.Namespace, rows: list) -> int:
    from gpu_process import Processes
    from gpu_results import Results

    end = time.monotonic() + 60 * options.minutes - _SPARE_SECONDS
    path = options.output / "results.jsonl"
    if path.exists() and not options.resume:
        return _refuse(f"{options.output} has results; give --resume to continue, or another --output")
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results(path)
    before = {number: signal.signal(number, _tell) for number in (signal.SIGTERM, signal.SIGINT)}
    status = 0
    try:
        processes, why = _set_up(options, results, Processes)
        if processes is None:
            return _refuse(why)
        for row in rows:
            _measure_row(options, row, results, processes, end)
    except _Told as told:
        status = 128 + told.args[0]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _publish(options, results)
    return status


def _tell(number: int, frame: object) -> None:
    raise _Told(number)


def _set_up(options: argparse.Namespace, results, make) -> tuple:
    """Return processes that can use the device, or None and the reason.

    If the device cannot be used after a fork, each process imports everything itself.
    """
    log, outcome = options.output / "log.txt", None
    for method in dict.fromkeys((options.start, "spawn")):
        processes = make(_PRELOAD, method, log)
        outcome = processes.run("gpu_steps:setup", _message(options, {"name": "setup"}), limit=180)
        if outcome.status == "done":
            break
    if outcome is None or outcome.status != "done":
        return None, f"{outcome and outcome.reason} (see {log})"
    known = results.result("setup")
    if known and known != outcome.result:
        return None, f"{options.output} has results of {known}, not of {outcome.result}; give another --output"
    if not known:
        results.add({"name": "setup", "kind": "setup", "date": date.today().isoformat(), **_parts_of(outcome)})
    return processes, ""


def _message(options: argparse.Namespace, row: dict) -> dict:
    """Return the message to a process."""
    shared = {"device": options.device, "toy": options.toy, "output": str(options.output.resolve())}
    shared["inductor"] = options.inductor or not options.toy
    paths = {name: path and str(path) for name, path in (("weights", options.weights), ("cifar10", options.cifar10))}
    return {**row, **shared, **paths}


def _parts_of(outcome) -> dict:
    return {"status": outcome.status, "reason": outcome.reason, "result": outcome.result}


def _measure_row(options: argparse.Namespace, row, results, processes, end: float) -> None:
    """Measure a row, unless it is already measured or too little time is left."""
    left = end - time.monotonic() - row.grace
    if results.has(row.name) or left < row.least:
        return
    message = _message(options, row.as_message())
    if row.setting is not None and row.setting.compile:
        message["batch"] = results.best_batch(row.kind, row.variant)
    message["flops_per_image"] = results.flops_per_image(row.kind, row.variant)
    began, limit = time.monotonic(), min(row.limit, left)
    outcome = processes.run(_WORK[row.kind], message, limit, row.grace, is_cut=left < row.limit)
    seconds = time.monotonic() - began
    written = {name: message.get(name) for name in ("name", "kind", "variant", "run", "setting")}
    results.add({**written, **_parts_of(outcome), "seconds": round(seconds, 1), "limit": round(limit)})
    rate = outcome.result.get("images_per_second")
    what = f", {rate:,.0f} images/s" if isinstance(rate, float) else ""
    why = f": {outcome.reason}" if outcome.reason else ""
    print(f"{row.name}: {outcome.status}{what}, {seconds:.0f} s{why}", file=sys.stderr, flush=True)


def _publish(options: argparse.Namespace, results) -> None:
    import common
    from gpu_results import as_markdown

    markdown = as_markdown(results)
    print(markdown)
    (options.output / "tables.md").write_text(markdown + "\n", encoding="utf-8")
    if options.write:
        common.update_section(common.HERE / "RESULTS.md", "gpu", markdown)


if __name__ == "__main__":
    sys.exit(main())
