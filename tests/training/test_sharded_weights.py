"""Weights sharded over two processes: optimizers and checkpoints.

Judged by the same optimizers on one device, which test_optimization.py holds to optax.
"""

from safetensors.torch import load_file

from hf_vit.settings.fields import FinetuneSettings
from hf_vit.training import checkpoint
from hf_vit.training.optimization import MovingAverage

from ..processes import finish, start
from .sharded_run import OPTIMIZERS, build, compare, gathered


def test_sharded_optimizers_step_as_on_one_device_and_continue_exactly(tmp_path):
    """On the two processes, and on one that reads what both wrote."""
    code = f"from pathlib import Path\nfrom tests.training.sharded_run import main\nmain(Path({str(tmp_path)!r}))"
    done = finish(start(code, 2))
    assert done.stdout.count("the same weights") == 2
    for optimizer, momentum_dtype in OPTIMIZERS:
        settings = FinetuneSettings(optimizer=optimizer, momentum_dtype=momentum_dtype)
        model, alone = build(settings, sharded=False)
        average = MovingAverage(dict(model.named_parameters()), 0.9)
        folder = tmp_path / f"{optimizer}_{momentum_dtype}"
        checkpoint.restore(folder / "step_00000002", model, alone, average.parameters)
        compare(load_file(folder / "at_saving.safetensors"), gathered(model, alone, average.parameters))
