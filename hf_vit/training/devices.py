"""Support for XLA devices (TPUs with torch_xla) beyond Accelerate's; on other devices these functions do nothing.

XLA records operations and runs them as one compiled graph when the step is marked. An unchanged graph is not compiled
again, so shapes and Python numbers in it must not change, and no result may be read between two marks. A learning rate
may change, because floats are passed as data. Two exceptions compile a step again: equal floats share one input, and 0
and 1 are constants of the graph. This happens a few times in a long run, e.g. when the learning rate is 0 or Adam's
bias correction reaches 1.
"""

import os
import platform

import torch
from accelerate import Accelerator


def is_xla(accelerator: Accelerator) -> bool:
    """Tell whether tensors are on an XLA device."""
    return accelerator.device.type == "xla"


def mark_step(accelerator: Accelerator) -> None:
    """Run the operations recorded since the last mark, without waiting for them."""
    if is_xla(accelerator):
        import torch_xla  # pyright: ignore[reportMissingImports]  # installed by constraints-xla.txt only

        torch_xla.sync()


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors to the CPU; the memory of XLA's tensors cannot be written to a file."""
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def keep_float32_weights(accelerator: Accelerator) -> None:
    """Make bf16 mean autocast, as on all other devices; call it before any tensor is on the XLA device.

    On a TPU, Accelerate makes torch_xla convert every float to bfloat16. The weights would then lose small updates.
    """
    if is_xla(accelerator):
        os.environ.update(XLA_USE_BF16="0", XLA_DOWNCAST_BF16="0")
        accelerator.native_amp = accelerator.mixed_precision == "bf16"


@torch.no_grad()
def make_states(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Create an optimiser's state as zeros, so that its first step has the same graph as the others."""
    if not is_xla(accelerator):
        return
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
    mark_step(accelerator)


def describe_device(device: torch.device) -> str:
    """Return type and name of a device: `cuda NVIDIA H100`, `cpu x86_64`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return f"{device.type} {name}".strip()
