"""Checkpoints of a run, and its output folder, which is locked during the run.

A checkpoint is a folder such as `step_00000120` with safetensors files, `state.json`, and `checksums.json` with the
SHA-256 of each file. `torch.distributed.checkpoint` writes and reads the tensors: each process writes its part, and
any number of processes can read them. A checkpoint is written in the background under a hidden name, flushed to disk
and then renamed, so the previous checkpoint survives a crash. A damaged checkpoint is moved to the folder `damaged`;
only `--overwrite` deletes it. Nothing is pickled. Random numbers in training are functions of (seed, step,
micro-batch), so no generator state is saved.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.tensor import DTensor
from torch.futures import Future as WriteFuture

from ..data.devices import copy_to_host
from ..data.fingerprint import describe_fingerprint
from ..data.splits import SKIPPED_IMAGES
from ..files.manifest import sha256_of
from ..files.output import (
    LOCK,
    MARK,
    add_to_marker,
    check_overwritable,
    flush_to_disk,
    restore_interrupted,
)
from ..files.reading import read_json_object
from ..files.removed_names import drop_removed_settings, with_new_keys
from ..settings.fields import TrainingSettings, fields_with
from .launch import cpu_group, make_states
from .optimization import build_schedule

FORMAT = 2  # version of the format; version 1 had one file of whole tensors for each group
_FILE_BYTES = 2**30  # target size of a file; writing needs as much additional memory

_STEP_FILES = ("*.safetensors", "state.json", "checksums.json")
_STEP_FOLDERS = ("checkpoints/step_????????", "checkpoints/damaged/step_????????*")
# What a run writes into its folder without `own_file`, for the marker of the folder.
_RUN_FILES = (
    *(f"{folder}/{name}" for folder in _STEP_FOLDERS for name in _STEP_FILES),
    *(".????????.incomplete.*", "*/.????????.incomplete.*"),  # left by a killed run
    *("training/*events.out.tfevents.*", "training/*hparams.yml"),  # TensorBoard files, written by accelerate
    *("profile/trace.json", SKIPPED_IMAGES),
)

Tensors = dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: the folder for all checkpoints; it is created with the first one.
        keep: number of checkpoints to keep, the newest ones.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[Future, _Writer] | None = None

    def save(self, step: int, tensors: Tensors, state: dict[str, Any]) -> None:
        """Start saving tensors and a state of JSON values; all processes must call it.

        The tensors may change after it returns. The checkpoint is complete after `wait`.

        Raises:
            OSError: the previous checkpoint could not be written; earlier ones are unchanged.
        """
        self.wait()
        content = json.dumps({**state, "format": FORMAT, "tensors": list(tensors)})
        writer = _Writer(self, step, content, _number_files(tensors))
        self._saving = self._thread.submit(writer.save, _copy_local_tensors(tensors), _communication_options()), writer

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
        return sorted(path for path in self.folder.glob("step_*") if re.fullmatch(r"step_\d{8}", path.name))

    def newest(self) -> tuple[Path | None, dict[Path, str]]:
        """Return the newest intact checkpoint, and a description of the damage of each newer one."""
        with suppress(OSError, CheckpointException):  # the next `save` or `wait` of the trainer reports a failure
            self.wait()
        damaged = {}
        for path in reversed(self.paths()):
            problem = find_damage(path)
            if problem is None:
                return path, damaged
            damaged[path] = problem
        return None, damaged


class _Writer(HuggingFaceStorageWriter):
    """Writer of one checkpoint: each process writes its part, then the main process completes the folder.

    Args:
        state: content of state.json, on the main process.
        files: number of the file of each tensor, from 1.
    """

    def __init__(self, checkpoints: Checkpoints, step: int, state: str, files: dict[str, int]):
        self.target = checkpoints.folder / f"step_{step:08d}"
        draft = checkpoints.folder / f".{step:08d}.incomplete.{self.target.name}"
        super().__init__(str(draft), fqn_to_index_mapping=files, save_distributed=True)
        self.checkpoints, self.state = checkpoints, state

    def save(self, share: dict[str, Any], exchange: dict[str, Any]) -> None:
        """Write this process's share of the tensors; after an error, delete the unfinished checkpoint."""
        try:
            save_tensors(share, storage_writer=self, **exchange)
        except BaseException:
            if _rank() == 0:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged; torch's version would create the folder here."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder before any process writes, and delete unfinished ones of a killed run."""
        for unfinished in self.target.parent.glob(".*.incomplete.*"):
            shutil.rmtree(unfinished)
        Path(self.path).mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> WriteFuture:
        """Write this process's files; the result is a list of (name, SHA-256)."""
        written = super().write_data(plan, planner).value()
        names = sorted({result.storage_data.relative_path for result in written})
        hashed: WriteFuture = WriteFuture()
        hashed.set_result([(name, sha256_of(Path(self.path) / name)) for name in names])
        return hashed

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Complete and rename the checkpoint, on the main process, after all processes have written their files."""
        draft = Path(self.path)
        (draft / "state.json").write_bytes(self.state.encode())
        sums = dict(pair for share in results for pair in share)
        sums["state.json"] = sha256_of(draft / "state.json")
        (draft / "checksums.json").write_bytes(json.dumps(sums, indent=1).encode())
        for entry in (draft / "state.json", draft / "checksums.json", draft):
            flush_to_disk(entry)
        os.rename(draft, self.target)
        flush_to_disk(self.target.parent)
        earlier = [path for path in reversed(self.checkpoints.paths()) if path < self.target]
        for old in earlier[self.checkpoints.keep - 1 :]:
            shutil.rmtree(old)


def _communication_options() -> dict[str, Any]:
    """Arguments of torch's `save` and `load` for communication between processes; all processes must call it."""
    if not dist.is_initialized():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process is intended
    return {"process_group": cpu_group("checkpoints"), "no_dist": not dist.is_initialized()}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _copy_local_tensors(tensors: Tensors) -> dict[str, Any]:
    """Copy the tensors that this process saves: its parts of sharded tensors, and every n-th of the others.

    All processes must have the same tensors in the same order. torch's `async_save` is not used, because it copies all
    tensors, and sharded tensors three times.
    """
    processes = dist.get_world_size() if dist.is_initialized() else 1
    share = {
        name: tensor
        for number, (name, tensor) in enumerate(tensors.items())
        if isinstance(tensor, DTensor) or number % processes == _rank()
    }
    return copy_to_host(share)


def _number_files(tensors: Tensors) -> dict[str, int]:
    """Assign a file number to each tensor, so that no file is much larger than 1 GiB."""
    files, size = {}, 0
    for name, tensor in tensors.items():
        files[name] = 1 + size // _FILE_BYTES
        size += tensor.nbytes
    return files


def read_state(path: Path) -> dict[str, Any]:
    """Read the content of a checkpoint's state.json.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    return with_new_keys(read_json_object(path / "state.json"))


def find_damage(path: Path) -> str | None:
    """Return a description of the damage of a checkpoint; None for an intact one."""
    try:
        sums = read_json_object(path / "checksums.json")
        found = {file.name: sha256_of(file) for file in (path / "state.json", *path.glob("*.safetensors"))}
    except (OSError, ValueError) as error:
        return str(error)
    return None if found == sums else "its files do not match checksums.json"


def quarantine(path: Path) -> Path:
    """Move a damaged checkpoint into the folder `damaged`; return its new path."""
    folder = path.parent / "damaged"
    folder.mkdir(exist_ok=True)
    number = len(list(folder.glob(f"{path.name}*")))
    return path.rename(folder / (f"{path.name}_{number}" if number else path.name))


def full_state_dict(model: torch.nn.Module, keep: bool) -> Tensors:
    """Return the model's full state dict on the CPU if `keep` is set, else an empty one.

    All processes must call it. Sharded tensors are gathered one by one; a process without `keep` holds only one at a
    time.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            tensors[name] = full.detach().cpu().contiguous()
    return tensors


def run_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ema: Tensors | None = None) -> Tensors:
    """Return the tensors of a run by name: `model/NAME`, `optimizer/PARAMETER/NAME` and `average/NAME`.

    The order is the same on all processes, even if the optimizer's state was restored in another order.
    """
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
    return tensors | {f"average/{name}": tensor for name, tensor in (ema or {}).items()}


@torch.no_grad()
def restore(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, ema: Tensors | None = None) -> None:
    """Restore the tensors of a run in place from a checkpoint; all processes must call it.

    Raises:
        ValueError: tensors are missing or belong to another model, or the checkpoint has an older format.
    """
    state = read_state(path)
    if state.get("format") != FORMAT:
        raise ValueError(
            f"cannot resume from {path}: it was written by another version of hf_vit; finish the run with that version"
        )
    saved: Any = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata  # name -> type and shape
    optimizer.state.clear()
    make_states(optimizer)
    tensors = run_tensors(model, optimizer, ema)
    for name in tensors.keys() - saved.keys():  # the parameter had no gradient before the checkpoint
        if name.startswith("optimizer/"):
            parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
            del tensors[name], optimizer.state[model.get_parameter(parameter)][key]
    differing = (tensors.keys() ^ saved.keys()) | (set(state.get("tensors", ())) - saved.keys())
    differing |= {name for name in tensors.keys() & saved.keys() if tensors[name].shape != saved[name].size}
    if differing:
        raise ValueError(f"cannot resume from {path}: its tensors do not match those of this run: {sorted(differing)}")
    load_tensors(cast(Any, tensors), storage_reader=HuggingFaceStorageReader(str(path)), **_communication_options())


# The name of each fingerprint of `fingerprint_run` in messages
_ROLES = {"data": "the training images (without held-out ones)", "model": "the model", "teacher": "the teacher"}


def choose_checkpoint(checkpoints: Checkpoints, accelerator: Accelerator) -> Path | None:
    """Return the newest intact checkpoint, the same on all processes; None without one. Damaged ones are moved away.

    Raises:
        ValueError: all checkpoints are damaged.
    """
    newest: list[Any] = [None]
    if accelerator.is_main_process:
        path, damaged = checkpoints.newest()
        if damaged and path is None:
            listed = "; ".join(f"{bad.name}: {problem}" for bad, problem in damaged.items())
            raise ValueError(
                f"cannot resume: every checkpoint in {checkpoints.folder} is damaged ({listed}); restore one of them, "
                "or choose another --output-dir to train from the beginning"
            )
        for bad, problem in damaged.items():
            print(f"{bad} is damaged ({problem}) and was moved to {quarantine(bad)}; resuming from {path} instead")
        newest = [path and str(path)]
    [name] = broadcast_object_list(newest)
    return None if name is None else Path(name)


def saved_per_device(checkpoints: Checkpoints) -> int | None:
    """Return `per_device_batch_size` of the newest readable checkpoint; None without one."""
    for path in reversed(checkpoints.paths()):
        with suppress(OSError, ValueError, TypeError, KeyError):  # a damaged checkpoint
            return int(read_state(path)["shards"]["per_device_batch_size"])
    return None


def saved_jpeg_dct(checkpoints: Checkpoints) -> str | None:
    """Return the cosine transform of JPEGs in the newest readable checkpoint; None without one.

    Checkpoints without it are of a version that decoded all JPEGs with Pillow.
    """
    for path in reversed(checkpoints.paths()):
        with suppress(OSError, ValueError, TypeError):  # a damaged checkpoint
            return str(read_state(path).get("jpeg_dct", "accurate"))
    return None


def check_same_run(saved: dict[str, Any], now: dict[str, Any], settings: TrainingSettings, draws: bool) -> None:
    """Raise ValueError if anything that affects the result differs from the checkpoint; the message lists it.

    Args:
        saved, now: content of the checkpoint's state.json, and of the one that would be saved now.
        draws: whether the model or the objective draws random numbers for each micro-batch.
    """
    before, after = (_relevant_parts(state, settings, draws) for state in (saved, now))
    differences = [
        f"{name} was {before.get(name)} and is {value}" for name, value in after.items() if before.get(name) != value
    ]
    steps, num_steps, done = saved["num_steps"], now["num_steps"], saved["step"]
    if steps != num_steps:
        earlier, schedule = build_schedule(settings, steps), build_schedule(settings, num_steps)
        if num_steps < done or any(earlier(step) != schedule(step) for step in range(done)):
            differences.append(
                f"the number of steps was {steps} and is {num_steps}, which changes steps already taken (set "
                "--decay-steps)"
            )
    if differences:
        raise ValueError(f"cannot resume with other settings, data or models: {'; '.join(differences)}")


def _relevant_parts(state: dict[str, Any], settings: TrainingSettings, draws: bool) -> dict[str, Any]:
    """Return the parts of state.json that affect the weights, except the number of steps.

    With random numbers for each micro-batch, the weights depend on the micro-batch size. With shards, whose images are
    assigned to processes one by one, they then also depend on the number of processes.
    """
    # Settings that are newer than the checkpoint must have their defaults; of what a path names, the content counts
    values = asdict(type(settings)()) | drop_removed_settings(state["settings"])
    free = {*fields_with("free_on_resume", settings), *fields_with("is_path", settings), "steps", "epochs"}
    parts = {name: value for name, value in values.items() if name not in free}
    parts["the mixed precision"] = state["precision"]
    for role, fingerprint in state["fingerprint"].items():
        parts[_ROLES[role]] = describe_fingerprint(fingerprint)
    if draws:
        names = ("per_device_batch_size", "processes") if settings.streaming else ("per_device_batch_size",)
        parts |= {name: state["shards"][name] for name in names}
    return parts


@contextmanager
def locked_output(output: Path, settings: TrainingSettings, accelerator: Accelerator) -> Iterator[None]:
    """Create the output folder of a run, mark a new one as ours, and lock it against other runs.

    Raises:
        ValueError: another run uses the folder; or it is not empty, and neither `resume` nor `overwrite` is set.
        FileExistsError: `overwrite` is set, but the folder has files that no run has written.
    """
    with ExitStack() as stack:
        if accelerator.is_main_process:
            restore_interrupted(output)
            output.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(output / LOCK, timeout=0))
            except Timeout:
                raise ValueError(
                    f"another process is training in {output}: wait until it ends, or choose another --output-dir"
                ) from None
            if os.name != "nt":  # where filelock deletes the file itself
                stack.callback((output / LOCK).unlink, missing_ok=True)
            found = [entry for entry in output.iterdir() if entry.name not in (LOCK, MARK)]
            if found and not settings.resume:
                _delete_earlier_run(output, found, settings.overwrite)
                found = []
            is_link = [entry.name for entry in found] == ["checkpoints"] and found[0].is_symlink()
            if not found or is_link or (output / MARK).is_file():
                add_to_marker(output, *_RUN_FILES)
        accelerator.wait_for_everyone()
        yield


def _delete_earlier_run(output: Path, found: list[Path], overwrite: bool) -> None:
    """Delete an earlier run if `overwrite` is set; symbolic links to the folder and to `checkpoints` stay."""
    if not overwrite:
        raise ValueError(
            f"{output} is not empty: continue its run with --resume, delete its run with --overwrite, or choose "
            "another --output-dir"
        )
    check_overwritable(output.resolve(), linked="checkpoints")
    checkpoints = output / "checkpoints"
    for entry in found:
        for unneeded in entry.iterdir() if entry == checkpoints and entry.is_symlink() else [entry]:
            shutil.rmtree(unneeded) if unneeded.is_dir() else unneeded.unlink()
    (output / MARK).unlink(missing_ok=True)
