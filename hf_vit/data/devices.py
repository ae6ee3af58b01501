"""What differs between devices. No other module asks for the name of a device: they ask for a capability.

torch answers most questions (`torch.accelerator`, `torch.get_device_module`), and some are answered by a trial on the
device. So a device that torch does not include, such as a TPU through torch-tpu, needs no line here.
The tables below have what cannot be asked.
"""

import os
import platform
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None

# XLA compiles a program for each shape: in eager mode too, and the compiled programs are the fast ones
_STATIC_SHAPES = frozenset({"tpu"})
# Backends of process groups on devices that Accelerate does not know
_PROCESS_GROUPS = {"tpu": "tpu_dist"}
_NOT_PINNED = frozenset({"mps"})  # torch's DataLoader warns that it does not pin there
# Peak in 1e12 dense bfloat16 operations a second (NVIDIA's data sheets; Google's pages of each TPU, per device as torch
# sees it). The first key that is in the device's name counts.
_PEAKS = {
    **{"B200": 2250, "H200": 989, "GH200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312},
    **{"L40S": 362, "L40": 181, "L4": 121, "A40": 150, "A10": 125, "RTX A6000": 155, "RTX 4090": 165, "RTX 3090": 71},
    **{"TPU v4": 275, "TPU v5e": 197, "TPU v5p": 459, "TPU v6e": 918, "TPU v7": 1153},
}


def find_accelerator() -> torch.device | None:
    """Return the type of the accelerator of this machine; None if there are only CPUs."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def is_accelerator(device: torch.device) -> bool:
    """Return whether tensors on the device are computed by the accelerator of this machine."""
    accelerator = find_accelerator()
    return accelerator is not None and accelerator.type == device.type


def process_group_backend() -> str | None:
    """Return the backend of process groups for an accelerator that Accelerate does not know; None for others."""
    accelerator = find_accelerator()
    if accelerator is None or accelerator.type not in _PROCESS_GROUPS:
        return None
    return f"cpu:gloo,{accelerator.type}:{_PROCESS_GROUPS[accelerator.type]}"


def list_devices() -> list[str]:
    """Return the names of the accelerators, and that of the CPU last."""
    accelerator = find_accelerator()
    names = []
    if accelerator is not None:
        indices = range(torch.accelerator.device_count())
        names = [describe_device(torch.device(accelerator.type, index)) for index in indices]
    return [*names, f"CPU {torch.backends.cpu.get_cpu_capability()} (threads: {torch.get_num_threads()})"]


def describe_device(device: torch.device) -> str:
    """Return type and name of a device: `cuda NVIDIA H100`, `cpu x86_64`."""
    name = platform.processor()
    if is_accelerator(device):
        get_name = getattr(torch.get_device_module(device), "get_device_name", None)  # MPS has none
        name = get_name(device) if get_name is not None else ""
    return f"{device.type} {name}".strip()


def find_peak(name: str) -> float | None:
    """Return a device's peak in dense bfloat16 operations a second, by its name; None if unknown."""
    found = [peak for key, peak in _PEAKS.items() if re.search(rf"\b{key}\b", name)]
    return found[0] * 1e12 if found else None


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return the peak memory so far in GiB: of the device if torch counts it there, else of this process."""
    if is_accelerator(device):
        try:
            allocated = torch.accelerator.max_memory_allocated(device)
        except RuntimeError:  # the device's allocator is not one that counts
            allocated = 0
        if allocated:
            return {"memory_gib": allocated / 2**30}
    unit = 1 if sys.platform == "darwin" else 2**10  # of ru_maxrss
    return {"memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30} if resource else {}


def set_algorithms(deterministic: bool, tf32: bool, benchmark: bool) -> None:
    """Set torch's algorithms for the whole process.

    Args:
        deterministic: an operation without a deterministic algorithm is an error.
        tf32: float32 products may be rounded to fewer bits.
        benchmark: cuDNN measures its algorithms and takes the fastest.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
    if tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    if benchmark:
        torch.backends.cudnn.benchmark = True


@cache
def can_pin_memory() -> bool:
    """Return whether the accelerator copies from pinned memory, while the host goes on."""
    accelerator = find_accelerator()
    if accelerator is None or accelerator.type in _NOT_PINNED:
        return False
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:
        return False
    return True


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start copying a CPU tensor to a device, without waiting for it if its memory can be pinned."""
    if is_accelerator(device) and can_pin_memory():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@torch.no_grad()
def copy_to_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to new memory of the host, all of them at once; DTensors stay DTensors."""
    non_blocking = can_pin_memory()  # into pinned memory, which not every device has
    copies = {
        name: tensor.detach().to("cpu", copy=True, non_blocking=non_blocking, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    if non_blocking:
        torch.accelerator.synchronize()
    return copies


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether the device has tensors of float64."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return False
    return True


@cache
def has_fused_optimizers(device: torch.device) -> bool:
    """Return whether torch has kernels for the device that update all parameters at once."""
    parameter = torch.zeros(1, device=device, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    optimizers: tuple[Any, ...] = (torch.optim.SGD, torch.optim.AdamW)
    try:
        for optimizer in optimizers:
            optimizer([parameter], lr=0.0, fused=True).step()
    except RuntimeError:
        return False
    return True


def has_static_shapes(device: torch.device) -> bool:
    """Return whether a new shape costs a compilation on this device, so that a run should have few of them."""
    return device.type in _STATIC_SHAPES


def can_compile(device: torch.device) -> bool:
    """Return whether compiling a model saves time: with Triton, or where everything is compiled."""
    return is_accelerator(device) and (has_static_shapes(device) or find_spec("triton") is not None)


def can_augment(device: torch.device) -> bool:
    """Return whether augmentation saves time there: crops have all shapes, and the arithmetic is in float64."""
    return device.type != "cpu" and not has_static_shapes(device) and has_float64(device)
