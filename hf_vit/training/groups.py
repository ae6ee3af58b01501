"""Process groups beside the one that training uses."""

from typing import Any

import torch.distributed as dist

_GROUPS: dict[str, tuple[Any, Any]] = {}  # purpose -> the world it belongs to, and the group


def cpu_group(purpose: str) -> Any:
    """All processes over gloo, the same group whenever the purpose is the same; every process must call it.

    What is exchanged in the background, or with tensors on the CPU, so never meets what training exchanges. None where
    there is no process group at all.
    """
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if purpose not in _GROUPS or _GROUPS[purpose][0] is not world:
        _GROUPS[purpose] = (world, dist.new_group(backend="gloo"))
    return _GROUPS[purpose][1]
