"""Imports of what a command needs, which are most of the time that a short command takes."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import within the block without garbage collections.

    torch and transformers make 660,000 objects that stay until the end. Python would walk over all of them several
    times while they are made, and once more when the process ends. In a process that is not the command's own, whose
    objects are not ours to keep, nothing changes.
    """
    if not getattr(sys.modules.get("hf_vit_command"), "is_running", False):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # later collections, that of the end too, leave out what there is now
        gc.enable()
