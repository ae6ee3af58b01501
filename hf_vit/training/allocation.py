"""Keep freed memory for the next training step (glibc)."""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h of glibc


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next step, on Linux with glibc; elsewhere nothing happens.

    It otherwise gives memory back to the system, which clears it page by page when the next step asks for it: 6 to 12 %
    of a step of ViT-S/16 and Ti/16 on two busy cores. Whoever has set glibc's own variables (MALLOC_TRIM_THRESHOLD_ and
    the like) has decided otherwise.
    """
    is_set = any(name.startswith("MALLOC_") for name in os.environ)
    if platform.libc_ver()[0] == "glibc" and not is_set:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_MAX, 0)  # large tensors too come from the memory that is kept
