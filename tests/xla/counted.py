"""What test_xla.py has `accelerate launch` start: a training script that counts what XLA does.

`main` runs the command that $COMMAND names with the arguments of the command line, and writes to the file $COUNTS the
counters of torch_xla at the beginning of each optimiser step and at the end.
"""

import json
import os
import threading
from pathlib import Path

import torch_xla
import torch_xla.debug.metrics as metrics

from hf_vit.training import loop
from hf_vit.training.commands import finetune, pretrain
from hf_vit.training.commands import main as run_command

METRICS = {"compiled": "CompileTime", "executed": "ExecuteTime", "waited": "TransferFromDeviceTime"}
DEVICES = int(os.environ.get("CPU_NUM_DEVICES", "1"))


def main() -> None:
    rows: list[dict[str, int]] = []
    take_step = loop.optimizer_step

    def counted(run, *arguments):
        if run.accelerator.is_main_process:
            rows.append(_count())
        return take_step(run, *arguments)

    with _lock:  # with several devices each has its thread, and all come here
        loop.optimizer_step = counted if take_step.__name__ != "counted" else take_step
    run_command({"finetune": finetune, "pretrain": pretrain}[os.environ["COMMAND"]])
    if rows:
        by_name = [name for name in metrics.counter_names() if name.startswith("aten::")]  # not lowered to XLA
        Path(os.environ["COUNTS"]).write_text(json.dumps({"rows": [*rows, _count()], "fallbacks": by_name}))


def _count() -> dict[str, int]:
    return {name: (metrics.metric_data(metric) or [0])[0] for name, metric in METRICS.items()}


_lock = threading.Lock()
_mark, _all_have_marked = torch_xla._XLAC._xla_step_marker, threading.Barrier(DEVICES)


def _mark_in_turn(*arguments, **options):
    """Mark a step on one device after the other.

    Two threads that compile a graph at once, on the CPU, give its reductions different numbers and then wait for each
    other until XLA ends the process; the second one has to find the graph that the first has compiled.
    """
    with _lock:
        _mark(*arguments, **options)
    _all_have_marked.wait()


if DEVICES > 1:
    torch_xla._XLAC._xla_step_marker = _mark_in_turn
