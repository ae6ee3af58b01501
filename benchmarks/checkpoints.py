"""Time that a checkpoint blocks training, compared with a checkpoint that one process writes while all others wait.

    python benchmarks/checkpoints.py [--variant S/16] [--processes 2] [--sharded] [--rounds 7]

CPU processes over gloo have a model and the state of AdamW: replicated, or sharded with --sharded (FSDP2). Both methods
write the same tensors into the same folder in turn. They flush the files to disk and compute the SHA-256 of each. With
"whole", every process gathers every tensor, the first one writes them, and all others wait. The time is that of the
call in the training thread, on the slowest process. "on disk" is the time until the checkpoint is complete.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from hf_vit.devices import keep_freed_memory
from hf_vit.files.download import sha256_of
from hf_vit.files.output import flush_to_disk, new_folder
from hf_vit.models.modeling_hf_vit import HfViTForImageClassification
from hf_vit.training.checkpoint import Checkpoints, run_tensors
from hf_vit.variants import config_of_variant


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="S/16")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="folder to write to (default: the system's temporary folder)")
    parser.add_argument("--started", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.started:
        measure(options)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(options.processes), __file__, *(sys.argv[1:] if argv is None else argv)]
        subprocess.run([*launcher, "--started", "--folder", folder], check=True)


def measure(options: argparse.Namespace) -> None:
    """Write with both methods in turn; print the medians."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as in training
    dist.init_process_group("gloo")
    model, optimizer = build(options)
    tensors = run_tensors(model, optimizer)
    times: dict[str, list[float]] = {"whole": [], "blocked": [], "on disk": []}
    for step in range(1, options.rounds + 2):
        times["whole"].append(longest(lambda step=step: write_whole(options.folder / f"whole_{step}", tensors)))
        store = Checkpoints(options.folder / "checkpoints", keep=1)
        times["blocked"].append(longest(lambda step=step, store=store: store.save(step, tensors, {})))
        times["on disk"].append(times["blocked"][-1] + longest(store.wait))
        if dist.get_rank() == 0:
            shutil.rmtree(options.folder / f"whole_{step}")
    if dist.get_rank() == 0:
        medians = {
            name: round(statistics.median(values[1:]), 4) for name, values in times.items()
        }  # the first turn is a warm-up
        size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
        share = round(medians["blocked"] / medians["whole"], 4)
        print(json.dumps({"variant": options.variant, "MiB": round(size), "seconds": medians, "blocked/whole": share}))
    dist.barrier()
    dist.destroy_process_group()


def build(options: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Build a model and an optimizer with state."""
    config: Any = config_of_variant(options.variant, num_labels=1000)
    model = HfViTForImageClassification(config)
    if options.sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model.vit.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def write_whole(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Gather every tensor on every process; the first process writes them while all others wait."""
    wholes = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    if dist.get_rank() == 0:
        with new_folder(folder) as draft:
            for group in ("model", "optimizer"):
                own = {name: tensor.detach() for name, tensor in wholes.items() if name.startswith(f"{group}/")}
                save_file(own, draft / f"{group}.safetensors")
            sums = {file.name: sha256_of(file) for file in sorted(draft.iterdir())}
            (draft / "checksums.json").write_text(json.dumps(sums), encoding="utf-8")
            for file in draft.iterdir():
                flush_to_disk(file)
    dist.barrier()


def longest(action) -> float:
    """Return the seconds of an action on the slowest process."""
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


if __name__ == "__main__":
    main()
