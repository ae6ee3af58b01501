"""Checkpoints that survive a crash: whole or absent, checked when read, the newest few kept.

A checkpoint is a folder `step_00000120` of safetensors files, `state.json`, and `checksums.json` with the SHA-256 of
each. It is written under another name, flushed to disk and renamed, so that a crash leaves the one before it. Nothing
is pickled. What is random in training is a function of (seed, step, process): there are no generator states to keep.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from ..files.download import sha256_of
from ..files.output import new_folder, write_text

_Tensors = dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: created with the first of them.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep

    def write(self, step: int, groups: dict[str, _Tensors], state: dict[str, Any]) -> Path:
        """Save tensors and JSON-able state; called by one process.

        Raises:
            OSError: when the disk is full; earlier checkpoints are as they were.
        """
        for unfinished in self.folder.glob(".*"):  # of a process that was killed
            shutil.rmtree(unfinished)
        path = self.folder / f"step_{step:08d}"
        with new_folder(path, overwrite=True, flush=True) as draft:
            for group, tensors in groups.items():
                save_file(tensors, draft / f"{group}.safetensors")
            write_text(draft / "state.json", json.dumps(state, indent=1))
            sums = {file.name: sha256_of(file) for file in sorted(draft.iterdir())}
            write_text(draft / "checksums.json", json.dumps(sums, indent=1))
        for old in self.paths()[: -self.keep]:
            shutil.rmtree(old)
        return path

    def paths(self) -> list[Path]:
        """The folders of the checkpoints, oldest first."""
        return sorted(path for path in self.folder.glob("step_*") if re.fullmatch(r"step_\d{8}", path.name))

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest whole checkpoint, and a sentence for each newer one that is damaged."""
        complaints = []
        for path in reversed(self.paths()):
            problem = damage(path)
            if problem is None:
                return path, complaints
            complaints.append(f"{path} is damaged ({problem}); the one before it is used")
        return None, complaints


def read(path: Path) -> tuple[dict[str, _Tensors], dict[str, Any]]:
    """Load the tensors, by group and name, and the state of a checkpoint."""
    groups = {file.stem: load_file(file) for file in path.glob("*.safetensors")}
    return groups, read_state(path)


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors."""
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint; None for an intact one."""
    try:
        sums = json.loads((path / "checksums.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"checksums.json: {error}"
    for name, expected in sums.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if sha256_of(path / name) != expected:
            return f"the SHA-256 of {name} is not the one it was saved with"
    return None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU, gathered from all processes if it is sharded; every process must call it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().contiguous()


def placed_like(full: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Put a whole tensor where `reference` is, sharded as that is."""
    full = full.to(reference.device)
    if isinstance(reference, DTensor) and full.shape == reference.shape:
        return distribute_tensor(full, reference.device_mesh, reference.placements)
    return full


def model_tensors(model: torch.nn.Module) -> _Tensors:
    """The model's state dict, whole and on the CPU; every process must call it."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def restore_model(model: torch.nn.Module, tensors: _Tensors) -> None:
    """Copy saved tensors into the model in place.

    Raises:
        ValueError: they are those of another model.
    """
    current = model.state_dict()
    if current.keys() != tensors.keys():
        raise ValueError(f"the checkpoint has other tensors than the model: {sorted(current.keys() ^ tensors.keys())}")
    for name, tensor in current.items():
        tensor.copy_(placed_like(tensors[name], tensor))


def optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> _Tensors:
    """The optimiser's state as `parameter name/state name`, whole and on the CPU; every process must call it."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = whole(torch.as_tensor(value))
    return tensors


def restore_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: _Tensors) -> None:
    """Do what `torch.optim.Optimizer.load_state_dict` does, but without casting a bfloat16 momentum to float32."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        parameter_name, _, key = name.rpartition("/")
        parameter = parameters[parameter_name]
        optimizer.state[parameter][key] = placed_like(tensor, parameter)
