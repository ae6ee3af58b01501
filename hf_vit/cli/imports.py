"""Fast imports of libraries, which take most of the time of a short command."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import within the block without garbage collection.

    torch and transformers create 660,000 objects that live until the end. Python would visit all of them several times
    during the imports, and again when the process ends. Nothing changes if the process is not the command's own.
    """
    if not getattr(sys.modules.get("hf_vit_command"), "is_running", False):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # later collections skip these objects
        atexit.register(gc.unfreeze)  # nanobind reports all that Python cannot free as leaked
        gc.enable()
