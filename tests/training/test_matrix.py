"""Every kind of run under DDP, FSDP2 and HSDP ends as in one process; see matrix.py."""

import json

import pytest

from . import matrix

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5  # of the largest weight
FAR = {"Muon": 2e-3}  # it iterates in bfloat16, in sums of another order when sharded; a step is about 1e-2 long
FAR |= {"AdamW, bfloat16 momentum": 3e-5}  # the first steps follow the signs of gradients, however small


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    work = tmp_path_factory.mktemp("matrix")
    matrix.write_inputs(work)
    matrix.train(matrix.ONE, "no", matrix.KINDS, work)
    return work


@pytest.mark.parametrize("launcher", ["DDP, 2 processes", "FSDP2, 2 processes", "HSDP, 2 x 2 processes"])
def test_a_launcher_equals_one_process(work, launcher):
    matrix.train(launcher, "no", matrix.KINDS, work)
    for kind in matrix.KINDS:
        tolerance = FAR.get(kind, TOLERANCE)
        assert matrix.difference(launcher, "no", kind, work) < tolerance, kind
        ours, theirs = (
            json.loads((matrix.output_of(one, "no", kind, work) / "metrics.json").read_text())
            for one in (launcher, matrix.ONE)
        )
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance), kind
        assert ours["best_step"] == theirs["best_step"], kind
