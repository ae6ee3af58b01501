"""What test_xla.py has `accelerate launch` start: a training script that counts what XLA does.

`main` runs the command that $COMMAND names with the arguments of the command line, and writes to the file $COUNTS the
counters of torch_xla at the beginning of each optimizer step and at the end.
"""

import json
import os
import sys
from pathlib import Path

import torch_xla.debug.metrics as metrics

from hf_vit.cli.training import run_training
from hf_vit.training.trainer import Trainer

METRICS = {"compiled": "CompileTime", "executed": "ExecuteTime", "waited": "TransferFromDeviceTime"}


def main() -> None:
    rows: list[dict[str, int]] = []
    take_step = Trainer.train_step

    def counted(*arguments):
        rows.append(_count())
        return take_step(*arguments)

    Trainer.train_step = counted
    run_training(os.environ["COMMAND"], sys.argv[1:])
    not_lowered = [name for name in metrics.counter_names() if name.startswith("aten::")]
    Path(os.environ["COUNTS"]).write_text(json.dumps({"rows": [*rows, _count()], "fallbacks": not_lowered}))


def _count() -> dict[str, int]:
    return {name: (metrics.metric_data(metric) or [0])[0] for name, metric in METRICS.items()}
