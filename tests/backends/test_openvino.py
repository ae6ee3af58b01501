"""OpenVINO in a process with children, which torch's `DataLoader` starts."""

import subprocess
import sys

import pytest

from ..paths import ROOT

END_AND_WAIT_FOR_A_CHILD = """\
import faulthandler, gc, signal, subprocess, torch
from tests.tiny_models import images, tiny
faulthandler.enable()  # gives the thread an alternate stack for signals
signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch.utils.data.DataLoader does
models = [tiny().optimize_for_inference(backend="openvino") for _ in range(2)]
for model in models:
    model(images(model))
while models:
    del models[0], model
    gc.collect()
    model = None
for _ in range(3):
    subprocess.run(["true"])
print("alive")
"""


@pytest.mark.slow
def test_a_process_survives_signals_after_its_programs_are_deleted():
    """The judge is the operating system: with a `Core` for each program it ended the process by SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", END_AND_WAIT_FOR_A_CHILD], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
