"""What XLA devices (TPUs by torch_xla) need beyond Accelerate; on all others these functions do nothing.

XLA records operations and runs them as one compiled graph when the step is marked. A graph that is the same as an
earlier one is not compiled again: shapes and Python numbers in it must not change, and nothing may read a result
between two marks. A learning rate may change, as floats come as data; but equal ones come as one, and 0 and 1 do not,
so that a long run compiles a step a few times more: when its rate is 0, or Adam's correction has become 1.
"""

import os
import platform

import torch
from accelerate import Accelerator


def is_xla(accelerator: Accelerator) -> bool:
    """Whether tensors are on an XLA device."""
    return accelerator.device.type == "xla"


def mark_step(accelerator: Accelerator) -> None:
    """Run what was recorded since the last mark, without waiting for it."""
    if is_xla(accelerator):
        import torch_xla  # pyright: ignore[reportMissingImports]  # of an environment of its own: constraints-xla.txt

        torch_xla.sync()


def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU; XLA's tensors have no memory that could be written to a file."""
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def keep_float32_weights(accelerator: Accelerator) -> None:
    """Take bf16 to mean autocast, as on all other devices, before anything is on the XLA device.

    On a TPU, Accelerate has torch_xla turn every float into bfloat16: the weights too, which then lose small updates.
    """
    if is_xla(accelerator):
        os.environ.update(XLA_USE_BF16="0", XLA_DOWNCAST_BF16="0")
        accelerator.native_amp = accelerator.mixed_precision == "bf16"


@torch.no_grad()
def make_states(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> None:
    """Create an optimiser's state as zeros, so that its first step is the same graph as the others."""
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
    """`cuda NVIDIA H100`, `cpu x86_64`"""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return f"{device.type} {name}".strip()
