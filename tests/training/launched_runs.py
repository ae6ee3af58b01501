"""Several training runs in the processes of one launch, on CPUs over gloo; what the launch templates start in tests.

Starting a process costs more than training a tiny model in it, so the runs share them. Accelerate takes FSDP only for
device types that it lists, and silently DDP on CPUs: here a CPU passes for one of them.
"""

import json
import os
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from hf_vit.cli import main as run_command
from hf_vit.training.objectives import Classification
from tests.training import simulated_tpu

COMPUTE = Classification.__call__


def take_fsdp_on_cpus() -> None:
    """Let Accelerate's state of a CPU process over gloo be that of a device which FSDP is for."""
    original = PartialState.__init__

    def initialize(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and os.environ.get("ACCELERATE_USE_FSDP") == "true":
            self.distributed_type = DistributedType.MULTI_XPU

    PartialState.__init__ = initialize


def lack_memory(images: int | None) -> None:
    """Let the last process have memory for so many images per forward; None: for any number."""

    def compute(self, model, batch, rng, **sizes):
        if PartialState().is_last_process and images and len(batch["image"]) > images:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return COMPUTE(self, model, batch, rng, **sizes)

    Classification.__call__ = compute


def main(runs: list[list[str]]) -> None:
    """Train with each command line, the first word of which is `pretrain` or `finetune`."""
    take_fsdp_on_cpus()
    if "SIMULATED_TPU" in os.environ:
        simulated_tpu.register()
        simulated_tpu.watch_steps()
    for command, *argv in runs:
        lack_memory(1 if "--find_batch_size" in argv else None)
        if status := run_command([command, *argv]):
            sys.exit(status)
    accelerator = Accelerator()
    accelerator.print(f"{accelerator.distributed_type.value} of {accelerator.num_processes}")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
