"""The launch of a run: the accelerator with its processes, process groups, and sharded weights (FSDP2)."""

import ctypes
import os
import platform
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
    TorchDynamoPlugin,
    parse_flag_from_env,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from ..data.devices import find_accelerator, process_group_backend, set_algorithms
from ..data.workers import start_server
from ..settings.fields import AUTO, DataSettings, TrainingSettings

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h of glibc
# Each of torchrun's variables, and what MPI (MPICH and Intel MPI, Open MPI, MVAPICH2) and Slurm's srun set in its place
_LAUNCHER_VARIABLES = {
    "WORLD_SIZE": ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"),
    "RANK": ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"),
    "LOCAL_RANK": ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": (
        "MPI_LOCALNRANKS",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "SLURM_STEP_TASKS_PER_NODE",  # such as "8(x2)"
    ),
}
_MASTER_PORT = "29500"  # that of torchrun and of Accelerate


def start_accelerator(settings: DataSettings) -> Accelerator:
    """Start the accelerator.

    Raises:
        ValueError: the number of processes differs from `num_processes`, from the launcher's, or from that of the
            template's groups; or the device does not support the precision or the sharding of the launch.
    """
    _refuse_other_engines()
    adopt_launcher_variables()
    set_algorithms(settings.deterministic, settings.tf32, settings.cudnn_benchmark)
    started = _started_processes()
    are_cpus = find_accelerator() is None or _introduce_accelerator(started)  # for Accelerate
    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier run here; its process group stays
    try:
        accelerator = Accelerator(
            cpu=started > 1 and are_cpus,  # unless Accelerate is told so, each process would train alone
            mixed_precision=settings.mixed_precision,
            dynamo_backend=DynamoBackend.NO,  # see `compile_options`: Accelerate would rename the weights
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],  # saves a copy
        )
    except RuntimeError as error:  # such as another number of processes than those of the template's groups
        raise ValueError(f"Accelerate cannot start this launch: {error}") from error
    _check_launch(settings, accelerator)
    if isinstance(settings, TrainingSettings) and settings.compile == AUTO and compile_options():
        settings.compile = True
        settings.validate()  # not every setting can be compiled
    start_server(settings.num_workers)
    return accelerator


def _introduce_accelerator(started: int) -> bool:
    """Set the device of an accelerator that Accelerate does not know, and start its process group.

    Accelerate then takes the processes for those of CPUs, and the device from the environment.

    Args:
        started: number of processes.

    Returns:
        Whether there is such an accelerator, and the launch does not ask for the CPU.
    """
    backend = process_group_backend()
    if backend is None or parse_flag_from_env("ACCELERATE_USE_CPU"):
        return False
    device = str(find_accelerator())
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", device)
    if started > 1 and not dist.is_initialized():
        dist.init_process_group(backend)
    return True


def _refuse_other_engines() -> None:
    """Raise ValueError if the launch asks for an engine that replaces the optimizer or divides the layers."""
    sizes = {name: os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1") for name in ("TP", "CP", "SP")}
    engines = {
        "DeepSpeed": os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true",
        "Megatron-LM": os.environ.get("ACCELERATE_USE_MEGATRON_LM", "").lower() == "true",
        "tensor, context or sequence parallelism": any(size != "1" for size in sizes.values()),
    }
    for engine, is_used in engines.items():
        if is_used:
            raise ValueError(
                f"the launch asks for {engine}, which is not supported: use the launch template fsdp to shard weights, "
                "gradients and optimizer state (hf-vit launch-configs)"
            )


def adopt_launcher_variables() -> None:
    """Set torchrun's environment variables from those of MPI or of Slurm's srun, if one of these started processes.

    Raises:
        ValueError: the processes are on several machines, and MASTER_ADDR does not say where rank 0 is.
    """
    if "WORLD_SIZE" in os.environ:
        return
    found = {}
    for name, others in _LAUNCHER_VARIABLES.items():
        values = [os.environ[other] for other in others if other in os.environ]
        if values:
            found[name] = str(int(values[0].partition("(")[0].partition(",")[0]))
    if int(found.get("WORLD_SIZE", 1)) == 1 or "RANK" not in found:
        return
    if "MASTER_ADDR" not in os.environ:
        if found.get("LOCAL_WORLD_SIZE") != found["WORLD_SIZE"]:
            raise ValueError(
                f"{found['WORLD_SIZE']} processes were started on several machines: set MASTER_ADDR to the host of the "
                "first one (rank 0)"
            )
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", _MASTER_PORT)
    os.environ.update(found)


def compile_options() -> dict[str, Any]:
    """Return the arguments of `torch.compile` that the launcher asks for (`--dynamo_backend` etc.); {} for none."""
    asked = TorchDynamoPlugin()  # from the environment variables ACCELERATE_DYNAMO_...
    return {} if asked.backend == DynamoBackend.NO else asked.to_kwargs()


def _check_launch(settings: DataSettings, accelerator: Accelerator) -> None:
    """Raise ValueError if the accelerator silently differs from the launch."""
    device, processes, started = accelerator.device.type, accelerator.num_processes, _started_processes()
    if processes == 1 < started or settings.num_processes not in (None, processes):
        raise ValueError(
            f"training would run in {processes} processes, but --num-processes is {settings.num_processes} and "
            f"WORLD_SIZE {started}: start them with accelerate launch or torchrun, on CPUs with the launch template "
            "multi_cpu"
        )
    if device == "cpu" and accelerator.mixed_precision == "fp16":
        raise ValueError("mixed precision fp16 needs a GPU (the device is a CPU): use bf16 or no")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not is_sharded(accelerator):
        raise ValueError(
            f"the launch asks for FSDP, which Accelerate does not support on {device} (processes: {processes}): use "
            "another launch template (hf-vit launch-configs)"
        )


def _started_processes() -> int:
    """Return the number of processes that the launcher started, by its environment variable; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)


@torch.no_grad()
def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Create an optimizer's state as zeros, by a step with gradients and a learning rate of 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def is_sharded(accelerator: Accelerator) -> bool:
    """Return whether the accelerator shards parameters, as DTensors."""
    return accelerator.distributed_type == DistributedType.FSDP


def shard_by_layers(accelerator: Accelerator, model: Any) -> None:
    """Configure FSDP2 to shard the model layer by layer, unless the launch names the classes to wrap.

    Accelerate's defaults are not used for two reasons. It takes all of `_no_split_modules`, fails if the model has no
    module of a class, and wraps the input embeddings twice. With bf16 it rounds the output of every layer, the loss
    and the sum of the gradients; here autocast decides, as without sharding.
    """
    if not is_sharded(accelerator):
        return
    # safe to ignore: no layer changes its input in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    plugin: Any = accelerator.state.fsdp_plugin
    if "FSDP_TRANSFORMER_CLS_TO_WRAP" not in os.environ:
        modules = {type(module).__name__: module for module in model.modules()}
        embeddings = set(model.get_input_embeddings().modules())
        names = [name for name in model._no_split_modules if name in modules]
        names = [name for name in names if not embeddings & set(modules[name].modules())]
        plugin.transformer_cls_names_to_wrap = names
    policy = plugin.mixed_precision_policy
    if policy is not None:
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            policy.param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )


def sharded_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by name; those of a model under FSDP2 are DTensors.

    After a forward without a backward, FSDP2 leaves the parameters of the root module whole.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.named_parameters())


def cpu_group(purpose: str) -> Any:
    """Return the gloo group of all processes for one purpose; every process must call it.

    Communication in the background, or of CPU tensors, does not interfere with that of training. The result is None
    without a default process group.
    """
    return _gloo_group(purpose, dist.group.WORLD) if dist.is_initialized() else None


@cache
def _gloo_group(purpose: str, world: Any) -> Any:
    return dist.new_group(backend="gloo")


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next training step; with another C library nothing happens.

    By default glibc returns memory to the system, which clears each page when the next step asks for it: 6 to 12% of a
    step of ViT-S/16 and Ti/16 on two busy cores. If one of glibc's own variables is set (MALLOC_TRIM_THRESHOLD_ and
    the like), nothing is changed.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not is_set:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_MAX, 0)  # large tensors use the kept memory too
