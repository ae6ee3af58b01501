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
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOALS = {"train S/16": 0.25, "train B/16": 0.35, "train L/16": 0.50, "infer": 0.60}  # shares of the measured peak
REFERENCE = "float32"  # the losses of the other settings are compared with this one's
BASE = {"train": "bf16 autocast", "infer": "pure bf16"}  # compiled settings start at the best batch size of these
TOY = "toy"  # a ViT of two layers, for CPUs
RUNS = ("loop", "loop, augmentation on the device", "resume", "CPU and device", "fp16", "FSDP2")
_SPARE_SECONDS = 5  # reserved for the tables
_WORK = {"run": "gpu_runs:train_from_files", "paper": "gpu_runs:finetune_cifar10"} | {
    name: f"gpu_models:{name}" for name in ("setup", "train", "infer", "images", "peak")
}
# How the same model is computed. precision: "float32", "tf32" (float32 with TF32 products), "autocast" (bfloat16
# products, float32 weights), "bfloat16" (everything), "fp8" (linear layers by torchao, the rest as with autocast).
# compile: a mode of torch.compile. pad: multiple to which the tokens are padded; the attention masks the padding.
# attention: "sdpa", "cudnn" (sdpa with cuDNN's kernel), or a repository of `kernels`.
DEFAULTS = {"precision": "autocast", "compile": None, "by_layers": False, "fused": True, "pad": None}
DEFAULTS |= {"attention": "sdpa", "channels_last": False}
_COMPILED = {"compile": "default"}
_TRAINING: dict[str, dict[str, Any]] = {
    BASE["train"]: {},
    "compile": _COMPILED,
    "compile, CUDA graphs": {"compile": "reduce-overhead"},
    REFERENCE: {"precision": "float32"},
}
_MORE_TRAINING: dict[str, dict[str, Any]] = {
    "compile, cuDNN attention": {**_COMPILED, "attention": "cudnn"},
    "compile, max-autotune": {"compile": "max-autotune"},
    **{f"compile, tokens padded to x{pad}": {**_COMPILED, "pad": pad} for pad in (8, 16, 64)},
    "compile, pure bf16": {**_COMPILED, "precision": "bfloat16"},
    "compile, channels_last": {**_COMPILED, "channels_last": True},
    "compile by layers": {**_COMPILED, "by_layers": True},
    "bf16 autocast, flash attention 3": {"attention": "kernels-community/flash-attn3"},
    "bf16 autocast, tokens padded to x8": {"pad": 8},
    "bf16 autocast, AdamW not fused": {"fused": False},
    "TF32": {"precision": "tf32"},
}
_FP8 = {"compile, fp8": {**_COMPILED, "precision": "fp8"}}
_INFERENCE = {
    name: {**setting, "precision": "bfloat16"}
    for name, setting in {**_TRAINING, BASE["infer"]: {}}.items()
    if name in (BASE["infer"], "compile", "compile, CUDA graphs")
}
_MORE_INFERENCE = {
    **{
        name: {**_MORE_TRAINING[name], "precision": "bfloat16"}
        for name in ("compile, max-autotune", "compile, cuDNN attention", "compile, channels_last")
    },
    "compile, tokens padded to x8": {**_COMPILED, "precision": "bfloat16", "pad": 8},
    "flash attention 3": {"precision": "bfloat16", "attention": "kernels-community/flash-attn3"},
    "TF32": {"precision": "tf32"},
    "float32": {"precision": "float32"},
}


class Omitted(Exception):
    """Error for a row that this machine cannot measure; the message has the reason."""


@dataclass
class Row:
    """Measurement in a separate process.

    Args:
        kind: "run" (a training run from files), "infer", "images", "train" (steps alone), "peak" or "paper".
        label: the kind of run, or the name of the setting.
        limit: time limit in seconds.
        least: smallest number of remaining seconds to start it.
        grace: seconds between SIGTERM and SIGKILL.
    """

    kind: str
    variant: str = ""
    label: str = ""
    setting: dict[str, Any] = field(default_factory=dict)
    limit: float = 120
    least: float = 30
    grace: float = 2

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kind, self.variant, self.label)))


def ladder(toy: bool, inductor: bool = False) -> Iterator[Row]:
    """Yield all rows, the most useful first; the toy model's rows cover every code path once."""
    if toy:
        yield from _toy_rows(inductor)
        return
    for run in RUNS:
        yield Row("run", "B/16" if "loop" in run else "S/16", run, limit=400, least=60, grace=5)
    sizes = ("B/16", "S/16", "L/16")
    for variant in sizes:
        yield from _timed("infer", variant, _INFERENCE)
    yield Row("images", least=20)
    for variant in sizes:
        yield from _timed("train", variant, _TRAINING)
    yield Row("peak", limit=90, least=10)
    yield Row("paper", limit=1500, least=120, grace=45)
    yield from _timed("train", "L/16", _FP8)
    for variant in sizes:
        yield from _timed("train", variant, _MORE_TRAINING)
        yield from _timed("infer", variant, _MORE_INFERENCE)
    yield from _timed("infer", "L/16", _FP8)
    for kind in ("train", "infer"):
        yield from _timed(kind, "H/14", {"compile": {**_COMPILED, "precision": "autocast"}, **_FP8})


def _timed(kind: str, variant: str, settings: Mapping[str, dict]) -> Iterator[Row]:
    """Yield rows with a time limit for each setting; large models get more time."""
    for label, setting in settings.items():
        mode = setting.get("compile")
        limit, least = (600, 200) if mode == "max-autotune" else (400, 60) if mode else (100, 30)
        limit = 200 if label == REFERENCE else limit  # it has losses of several seeds
        yield Row(kind, variant, label, setting, limit * {"L/16": 1.5, "H/14": 2}.get(variant, 1), least)


def _toy_rows(inductor: bool) -> Iterator[Row]:
    """Yield the rows of the toy model; without inductor only one setting is compiled, to make its graphs."""
    for run in RUNS:
        yield Row("run", TOY, run, limit=600, least=1)
    seen = []
    for kind, settings in (("train", {**_TRAINING, **_MORE_TRAINING, **_FP8}), ("infer", _INFERENCE | _MORE_INFERENCE)):
        for label, setting in settings.items():
            if not inductor and (kind, label) != ("train", "compile"):
                setting = {name: value for name, value in setting.items() if name not in ("compile", "by_layers")}
            if setting.get("pad") in (None, 8) and (kind, setting) not in seen:
                seen.append((kind, setting))
                yield Row(kind, TOY, label, setting, limit=600, least=1)
    for kind in ("images", "peak", "paper"):
        yield Row(kind, limit=600, least=1, grace=10)


class Results(dict):
    """Rows by name, in the order of measurement, and their file of JSON lines.

    An incomplete last line, which a killed process may leave, is removed.
    """

    def __init__(self, path: Path):
        self.path = path
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        super().__init__((row["name"], row) for row in map(json.loads, whole.splitlines()))
        path.write_bytes(whole + b"\n" if whole else b"")

    def add(self, row: dict[str, Any]) -> None:
        """Add a row and write it to disk."""
        self[row["name"]] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def result(self, name: str) -> dict[str, Any]:
        return self.get(name, {}).get("result") or {}


def main(argv: list[str] | None = None) -> int:
    """Measure; the exit status is 0, 2 if no row can start, or 128 plus the number of a signal."""
    options = parse_arguments(argv)
    rows = list(ladder(options.toy, options.inductor))
    rows = [row for row in rows if not options.only or any(text in row.name for text in options.only)]
    if options.list:
        print("\n".join(row.name for row in rows))
        return 0
    end = time.monotonic() + 60 * options.minutes - _SPARE_SECONDS
    path = options.output / "results.jsonl"
    if path.exists() and not options.resume:
        return _refuse(f"{options.output} has results; give --resume to continue, or another --output")
    sys.path.insert(0, str(ROOT))  # processes that multiprocessing spawns get this list, others the variable
    paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # without it, imports can initialize CUDA, which breaks forks
    options.output.mkdir(parents=True, exist_ok=True)
    results = Results(path)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    status = 0
    try:
        method = _set_up(options, results)
        if method is None:
            return 2
        for row in rows:
            left = end - time.monotonic() - row.grace
            if results.get(row.name, {}).get("status") not in (None, "cut off"):
                continue
            if left >= row.least:
                _measure(options, row, results, method, left)
            else:
                print(f"{row.name}: not started, since fewer than {row.least:.0f} s are left", file=sys.stderr)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except SystemExit as ended:
        status = int(ended.code or 0)
    _publish(options, results)
    return status


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
    return parser.parse_args(argv)


def _refuse(reason: str) -> int:
    print(f"error: cannot measure: {reason}", file=sys.stderr)
    return 2


def _set_up(options: argparse.Namespace, results: Results) -> str | None:
    """Return how to start processes that can use the device: spawn, if it cannot be used after a fork; None: not."""
    row: dict[str, Any] = {}
    for method in ("forkserver", "spawn"):
        row = run_apart(_message(options, Row("setup")), method, limit=180)
        if row["status"] == "done":
            break
    else:
        _refuse(f"{row['reason']} (see {options.output / 'log.txt'})")
        return None
    known = results.result("setup")
    if known and known != row["result"]:
        _refuse(f"{options.output} has results of {known}, not of {row['result']}; give another --output")
        return None
    if not known:
        results.add({"name": "setup", "kind": "setup", "date": date.today().isoformat(), **row})
    return method


def _message(options: argparse.Namespace, row: Row) -> dict[str, Any]:
    """Return the arguments of the process that measures a row."""
    given = {"device": options.device, "toy": options.toy, "output": str(options.output.resolve())}
    paths = {
        name: path and str(path.resolve()) for name, path in vars(options).items() if name in ("weights", "cifar10")
    }
    inductor = options.inductor or not options.toy
    return {**asdict(row), "name": row.name, **given, **paths, "inductor": inductor, "setting": DEFAULTS | row.setting}


def _measure(options: argparse.Namespace, row: Row, results: Results, method: str, left: float) -> None:
    """Measure a row; a row that the end of the time cuts off is repeated by --resume."""
    message = _message(options, row)
    if message["setting"]["compile"] and row.kind in BASE:
        message["batch"] = results.result(f"{row.kind} {row.variant} {BASE[row.kind]}").get("batch")
    began, limit = time.monotonic(), min(row.limit, left)
    outcome = run_apart(message, method, limit, row.grace)
    if outcome["status"] == "timed out" and left < row.limit:
        outcome |= {"status": "cut off", "reason": "the run's time was over"}
    seconds = round(time.monotonic() - began, 1)
    shown = {name: message[name] for name in ("name", "kind", "variant", "label", "setting")}
    results.add({**shown, **outcome, "seconds": seconds, "limit": round(limit)})
    rate = outcome["result"].get("images_per_second")
    speed = f", {rate:,.0f} images/s" if isinstance(rate, float) else ""
    print(f"{row.name}: {outcome['status']}{speed}, {seconds:.0f} s {outcome['reason']}", file=sys.stderr, flush=True)


def run_apart(message: dict[str, Any], method: str, limit: float, grace: float = 2) -> dict[str, Any]:
    """Measure in a separate process, so that a crash or a hang does not affect the caller.

    The processes are forked from a server that has imported what they need: the imports take ten seconds, and there are
    a hundred rows.

    Args:
        limit: seconds.
        grace: seconds between SIGTERM and SIGKILL.

    Returns:
        "status" ("done", "omitted", "failed" or "timed out"), "result" (the last one that was reported) and "reason".
    """
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["torch._dynamo", "torch._functorch.aot_autograd", "gpu_models", "gpu_runs"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(message, theirs))
    process.start()
    theirs.close()
    end, result, status, reason = time.monotonic() + limit, {}, "timed out", f"not ready after {limit:.0f} s"
    try:
        while ours.poll(max(end - time.monotonic(), 0)):
            try:
                status, reason, latest = ours.recv()
                result = latest or result
            except EOFError:
                process.join(5)
                status, reason = "failed", f"exit status {process.exitcode}"
            if status != "partial":
                break
            status, reason = "timed out", f"not ready after {limit:.0f} s"
    finally:
        process.terminate()
        process.join(grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with all processes that it started
        process.kill()
        process.join(5)
    return {"status": status, "result": result, "reason": reason}


def _work(message: dict[str, Any], theirs: Any) -> None:
    """Measure in this process: in its own process group, output to a file, result to the pipe."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(Path(message["output"]) / "log.txt", "a", buffering=1, encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(f"\n== {message['name']}", flush=True)
    module, _, function = _WORK[message["kind"]].partition(":")
    try:
        measure: Callable[..., dict] = getattr(importlib.import_module(module), function)
        outcome = "done", "", measure(message, lambda partial: theirs.send(("partial", "", partial)))
    except BaseException as error:  # a row may fail in any way; gpu.py runs as __main__, so Omitted has two classes
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0][:300]
        is_omitted = type(error).__name__ == Omitted.__name__
        outcome = ("omitted", first, {}) if is_omitted else ("failed", f"{type(error).__name__}: {first}", {})
    theirs.send(outcome)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)


def _publish(options: argparse.Namespace, results: Results) -> None:
    import common

    markdown = as_markdown(results)
    print(markdown)
    (options.output / "tables.md").write_text(markdown + "\n", encoding="utf-8")
    if options.write:
        common.update_section(common.HERE / "RESULTS.md", "gpu", markdown)


def as_markdown(results: Results) -> str:
    """Return a table for each kind of row, and the list of rows without a result."""
    from common import table

    setup, sections = results.result("setup"), []
    if setup:
        versions = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
        warning = " Toy sizes: the figures mean nothing." if setup["toy"] else ""
        sections.append(f"Measured {results['setup']['date']} on {setup['device']}; {versions}.{warning}")
    for kind, title in {"run": "Training runs from files", "infer": "Inference", "train": "Training steps"}.items():
        rows = [row for row in results.values() if row["kind"] == kind and row["result"]]
        cells = [_cells(results, row) for row in rows]
        columns = list(dict.fromkeys(name for row in cells for name in row))
        lines = [[row.get(name, "") for name in columns] for row in cells]
        sections += [f"**{title}**\n\n{table(columns, lines)}"] if lines else []
    for kind, title in {
        "images": "Images per second",
        "peak": "Matrix products, FLOP/s",
        "paper": "Fine-tuning",
    }.items():
        if found := results.result(kind):
            lines = [[name, _as_text(value)] for name, value in found.items()]
            sections.append(f"**{title}**\n\n{table(['', ''], lines)}")
    sections.append(
        "\n".join(f"* {row['name']}: {row['status']}, {row['reason']}" for row in results.values() if row["reason"])
    )
    return "\n\n".join(filter(None, sections))


def _cells(results: Results, row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row by column; "!" marks a loss that differs from float32's by more than seeds do."""
    found, kind = dict(row["result"]), f"{row['kind']} {row['variant']}"
    precision = row["setting"]["precision"]
    peak = results.result("peak").get(precision if precision in ("float32", "tf32") else "bfloat16")
    if peak and "flops_per_image" in found:
        found["share of peak"] = found["images_per_second"] * found["flops_per_image"] / peak
        found["goal"] = GOALS.get(kind, GOALS.get(row["kind"]))
    reference = results.result(f"{kind} {REFERENCE}").get("losses")
    if "losses" in found and reference:
        spread = max(reference) - min(reference)
        differs = abs(found["loss"] - reference[0]) > spread
        found["float32's loss, spread"] = f"{reference[0]:.3f}, {spread:.3f}{' !' if differs else ''}"
    hidden = ("losses", "windows", "flops_per_image")
    cells = {name: _as_text(value) for name, value in found.items() if name not in hidden}
    return {"": f"{row['variant']} {row['label']}", **cells, "seconds, limit": f"{row['seconds']:.0f}, {row['limit']}"}


def _as_text(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
