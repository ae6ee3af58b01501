"""Training on a simulated TPU ends as on the CPU, and no step reads a result; see simulated_tpu.py."""

import json
import subprocess
import sys

import pytest

from ..processes import environment
from . import matrix

pytestmark = pytest.mark.slow

# Run in a process of its own, because a process has one such device. Each line after the first is refused or computed.
CAPABILITIES = """
import json
from hf_vit.data import devices
from tests.training import simulated_tpu
simulated_tpu.register()
import torch
device = devices.find_accelerator()
can = [devices.has_fused_optimizers, devices.has_float64, devices.can_compile, devices.can_augment]
found = {one.__name__: one(device) for one in can} | {"can_pin_memory": devices.can_pin_memory()}
tensor = torch.arange(6.0, device=device).view(2, 3)
tensor[:, 1:].add_(1)
found["in place, through a view"] = tensor.t().cpu().tolist()
lines = "tensor.nonzero()", "tensor[tensor > 1]", "tensor.unique()", "tensor.double()", "tensor.to_sparse()"
in_a_step = "tensor.sum().item()", "tensor.cpu()", "bool(tensor.any())", "torch.equal(tensor, tensor)"
for line in (*lines, *in_a_step):
    try:
        with simulated_tpu.step():
            eval(line)
    except simulated_tpu.Refused:
        continue
    found[line] = "computed"
print(json.dumps(found))
"""


def test_capabilities_and_refusals():
    done = subprocess.run(
        [sys.executable, "-c", CAPABILITIES], env=environment(), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "has_fused_optimizers": False,
        "has_float64": False,
        "can_compile": True,
        "can_augment": False,
        "can_pin_memory": False,
        "in place, through a view": [[0, 3], [2, 5], [3, 6]],
    }


KINDS = ["EMA", "native", "masked patches", "distillation", "accumulation"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("simulated")
    matrix.write_inputs(work)
    matrix.train(matrix.ONE, "no", KINDS, work)
    return work


@pytest.mark.parametrize("launcher", [name for name in matrix.LAUNCHERS if name.startswith("simulated")])
def test_a_simulated_tpu_equals_the_cpu(work, launcher):
    """The third step is that of a resumed run. A refused operation is an error, and a read in a step but the first."""
    matrix.train(launcher, "no", KINDS, work)
    for kind in KINDS:
        assert matrix.difference(launcher, "no", kind, work) < 1e-5, kind
