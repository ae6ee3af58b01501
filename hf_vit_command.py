"""Entry point of the command `hf-vit`, outside of the package so that a command imports only what it needs.

`import hf_vit` registers the model types with transformers' Auto classes, which takes seconds. Commands import modules
of the package, and those that load a model import `hf_vit.models.registry`; most others need neither torch nor
transformers. So this command does not run `hf_vit/__init__.py`.
"""

import gc
import os
import sys
from importlib.util import find_spec, module_from_spec

# Settings of OpenMP for threads that wait for each other. By default they keep their core busy, so that beside other
# processes each product waits for the slowest: 60 steps of 24 linear layers of 192 features took 425 s beside about
# twenty processes on two cores, and 103 s with threads that sleep. What the user sets is kept.
_WAITING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}


def main(argv: list[str] | None = None) -> int:
    """Run one command; see `hf_vit.cli`. The scripts of training/ call it too."""
    spec = find_spec("hf_vit")
    if spec is not None and "hf_vit" not in sys.modules:
        sys.modules["hf_vit"] = module_from_spec(spec)  # a package with the modules of ours, not yet initialized
    if not _WAITING & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch is imported, also by data workers
    # torch and transformers create 660,000 objects that live until the end; Python would visit them all several times.
    gc.set_threshold(50_000)
    from hf_vit.cli import main

    return main(argv)
