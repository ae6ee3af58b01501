"""Additional process groups, for communication beside training."""

from typing import Any

import torch.distributed as dist

_GROUPS: dict[str, tuple[Any, Any]] = {}  # purpose -> (default group, this group)


def cpu_group(purpose: str) -> Any:
    """Return the gloo group of all processes for one purpose; every process must call it.

    Communication in the background, or of CPU tensors, does not interfere with that of training. The result is None
    without a default process group.
    """
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if purpose not in _GROUPS or _GROUPS[purpose][0] is not world:
        _GROUPS[purpose] = (world, dist.new_group(backend="gloo"))
    return _GROUPS[purpose][1]
