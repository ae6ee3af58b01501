"""Checkpoints that survive a crash, written in the background.

A checkpoint is a folder `step_00000120` of safetensors files, `state.json`, and `checksums.json` with the SHA-256 of
each file. `torch.distributed.checkpoint` writes and reads the tensors: each process writes its part, and any number of
processes can read them. A checkpoint is written under a hidden name, flushed to disk and renamed; after a crash, the
checkpoint before it is intact. A damaged checkpoint is moved to the folder `damaged` and never deleted. Nothing is
pickled. Random numbers in training are functions of (seed, step, micro-batch), so no generator state is saved.
"""

import json
import os
import re
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.tensor import DTensor
from torch.futures import Future as WriteFuture

from ..files.download import sha256_of
from ..files.output import flush_to_disk
from .groups import cpu_group

FORMAT = 2  # version of the format; version 1 had one file of whole tensors for each group
_FILE_BYTES = 2**30  # size of one file; writing needs as much memory again

Tensors = dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: created with the first checkpoint.
        keep: number of newest checkpoints to keep.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[Future, _Writer] | None = None

    def save(self, step: int, tensors: Tensors, state: dict[str, Any]) -> None:
        """Start saving tensors and a state of JSON values; every process must call it.

        The tensors may change after it returns. The checkpoint is complete after `wait`.

        Raises:
            OSError: the previous checkpoint could not be written; earlier ones are unchanged.
        """
        self.wait()
        content = json.dumps({**state, "format": FORMAT, "tensors": list(tensors)}) if _rank() == 0 else ""
        writer = _Writer(self.folder, step, content, self.keep, _distribute(tensors))
        self._saving = self._thread.submit(writer.save, _copy_share(tensors), _exchange()), writer

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if any.

        Raises:
            OSError: it could not be written; earlier ones are unchanged.
        """
        if self._saving is None:
            return
        saving, writer = self._saving
        try:
            saving.result()
        except CheckpointException as error:
            failure = next(iter(error.failures.values()))[0]
            if not isinstance(failure, OSError):
                raise
            hint = "; all processes must see this folder" if isinstance(failure, FileNotFoundError) else ""
            raise OSError(f"cannot write {writer.target}: {failure.strerror or failure}{hint}") from error
        finally:
            self._saving = None

    def paths(self) -> list[Path]:
        """Folders of the checkpoints, oldest first."""
        return _paths(self.folder)

    def newest(self) -> tuple[Path | None, dict[Path, str]]:
        """Return the newest intact checkpoint, and the damage of each newer one."""
        with suppress(OSError):  # a failed save is reported elsewhere
            self.wait()
        damaged = {}
        for path in reversed(self.paths()):
            problem = damage(path)
            if problem is None:
                return path, damaged
            damaged[path] = problem
        return None, damaged


class _Writer(HuggingFaceStorageWriter):
    """Writer of one checkpoint: each process writes its part, and the first one completes it.

    Args:
        state: content of state.json; only the first process needs it.
        keep: number of checkpoints to keep.
        files: file number of each tensor, from 1.
    """

    def __init__(self, folder: Path, step: int, state: str, keep: int, files: dict[str, int]):
        self.target = folder / f"step_{step:08d}"
        draft = folder / f".{step:08d}.incomplete.{self.target.name}"
        super().__init__(str(draft), fqn_to_index_mapping=files, save_distributed=True)
        self.state, self.keep = state, keep

    def save(self, share: dict[str, Any], exchange: dict[str, Any]) -> None:
        """Write this process's share of the tensors; after an error nothing of the checkpoint is left."""
        try:
            save_tensors(share, storage_writer=self, **exchange)
        except BaseException:
            if _rank() == 0:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is; the first process creates the folder."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder before any process writes, and delete unfinished ones of a killed run."""
        for unfinished in self.target.parent.glob(".*.incomplete.*"):
            shutil.rmtree(unfinished)
        Path(self.path).mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> WriteFuture:
        """Write this process's files; the result is (name, SHA-256) of each one."""
        written = super().write_data(plan, planner).value()
        names = sorted({result.storage_data.relative_path for result in written})
        hashed: WriteFuture = WriteFuture()
        hashed.set_result([(name, sha256_of(Path(self.path) / name)) for name in names])
        return hashed

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Complete and rename the checkpoint, on the first process after all have written."""
        draft = Path(self.path)
        (draft / "state.json").write_bytes(self.state.encode())
        sums = dict(pair for share in results for pair in share)
        sums["state.json"] = sha256_of(draft / "state.json")
        (draft / "checksums.json").write_bytes(json.dumps(sums, indent=1).encode())
        for entry in (draft / "state.json", draft / "checksums.json", draft):
            flush_to_disk(entry)
        os.rename(draft, self.target)
        flush_to_disk(self.target.parent)
        earlier = [path for path in _paths(self.target.parent) if path < self.target]
        for old in earlier[: max(len(earlier) + 1 - self.keep, 0)]:
            shutil.rmtree(old)


def _paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8}", path.name))


def _exchange() -> dict[str, Any]:
    """Arguments of torch's `save` and `load` for communication; every process must call it."""
    if not dist.is_initialized():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # intended
    return {"process_group": cpu_group("checkpoints"), "no_dist": not dist.is_initialized()}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@torch.no_grad()
def _copy_share(tensors: Tensors) -> dict[str, Any]:
    """Copy the tensors that this process saves: its parts of sharded tensors, and its share of the others.

    Every process must have the same tensors in the same order. torch's `async_save` is not used: it copies all tensors,
    and sharded ones three times.
    """
    loads = [0] * (dist.get_world_size() if dist.is_initialized() else 1)
    share = {}
    for name, tensor in tensors.items():
        owner = loads.index(min(loads))
        if isinstance(tensor, DTensor) or owner == _rank():
            share[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if not isinstance(tensor, DTensor):
            loads[owner] += tensor.nbytes
    return share


def _distribute(tensors: Tensors) -> dict[str, int]:
    """Assign a file number to each tensor, so that no file is much larger than 1 GiB."""
    files, size = {}, 0
    for name, tensor in tensors.items():
        files[name] = 1 + size // _FILE_BYTES
        size += tensor.nbytes
    return files


def read_state(path: Path) -> dict[str, Any]:
    """Read the content of a checkpoint's state.json."""
    return json.loads((path / "state.json").read_text(encoding="utf-8"))


def damage(path: Path) -> str | None:
    """Describe the damage of a checkpoint; None for an intact one."""
    try:
        sums = json.loads((path / "checksums.json").read_text(encoding="utf-8"))
        read = {"state.json", *(file.name for file in path.glob("*.safetensors"))}
        if not isinstance(sums, dict) or not read <= sums.keys():
            return f"checksums.json does not list {', '.join(sorted(read))}"
        with ThreadPoolExecutor() as pool:
            found = dict(zip(sums, pool.map(lambda name: sha256_of(path / name), sums), strict=True))
    except (OSError, ValueError) as error:
        return str(error)
    changed = [name for name in sums if found[name] != sums[name]]
    return f"the SHA-256 of {changed[0]} is not the one it was saved with" if changed else None


def set_aside(path: Path) -> Path:
    """Move a damaged checkpoint into the folder `damaged`; return its new path."""
    folder = path.parent / "damaged"
    folder.mkdir(exist_ok=True)
    number = len(list(folder.glob(f"{path.name}*")))
    return path.rename(folder / (f"{path.name}_{number}" if number else path.name))


def whole_model(model: torch.nn.Module, keep: bool) -> Tensors:
    """Return the model's whole state dict on the CPU where `keep` is set, else an empty one.

    Every process must call it. Sharded tensors are gathered one by one, so that a process without `keep` holds one at a
    time.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            tensors[name] = full.detach().cpu().contiguous()
    return tensors


def run_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer, average: Tensors | None = None) -> Tensors:
    """Return the tensors of a run by name: `model/NAME`, `optimizer/PARAMETER/NAME` and `average/NAME`.

    The order is the same on every process, also where an optimizer was restored in another order.
    """
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
    return tensors | {f"average/{name}": tensor for name, tensor in (average or {}).items()}


@torch.no_grad()
def restore(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, average: Tensors | None = None
) -> None:
    """Restore the tensors of a run in place from a checkpoint; every process must call it.

    Raises:
        ValueError: tensors are missing or belong to another model, or an earlier version of hf_vit wrote them.
    """
    state = read_state(path)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"cannot resume from {path}: an earlier version of hf_vit wrote it; finish the run with that version"
        )
    saved: Any = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata  # name -> type and shape
    if missing := set(state.get("tensors", ())) - saved.keys():
        raise ValueError(f"cannot resume from {path}: {len(missing)} of its tensors are missing: {sorted(missing)}")
    optimizer.state.clear()
    tensors = run_tensors(model, optimizer, average)
    for name in sorted(saved):  # the reader lists files in the order of the directory
        group, _, rest = name.partition("/")
        if group == "optimizer":
            parameter, _, key = rest.rpartition("/")
            tensors[name] = _empty_state(optimizer, model.get_parameter(parameter), saved[name])
            optimizer.state[model.get_parameter(parameter)][key] = tensors[name]
    differing = tensors.keys() ^ saved.keys()
    differing |= {name for name in tensors.keys() & saved.keys() if tensors[name].shape != saved[name].size}
    if differing:
        raise ValueError(f"cannot resume from {path}: its tensors differ from the run's: {sorted(differing)}")
    read: Any = {
        name: torch.empty_like(t, device="cpu") if t.device.type == "xla" else t for name, t in tensors.items()
    }
    load_tensors(read, storage_reader=HuggingFaceStorageReader(str(path)), **_exchange())
    for name, tensor in tensors.items():
        if read[name] is not tensor:  # on XLA
            tensor.copy_(read[name])


def _empty_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, saved: Any) -> torch.Tensor:
    """Return an empty tensor for a saved tensor of the optimiser's state, with its dtype.

    It has the device and sharding of the parameter. A step count is on the CPU unless the optimiser updates it on the
    device.
    """
    dtype = saved.properties.dtype
    if saved.size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    group = next(group for group in optimizer.param_groups if any(parameter is own for own in group["params"]))
    on_device = group.get("fused") or group.get("capturable")
    return torch.empty(saved.size, dtype=dtype, device=parameter.device if on_device else "cpu")
