"""The fuzz gate itself: it catches planted faults, and a short run of every kind finds none."""

import json
import subprocess
import sys

import pytest

from ..paths import ROOT
from ..processes import environment, finish, start

# Run in a process that may fork the workers: that of the tests has threads.
PLANTED = """
import json, os, time
from pathlib import Path
from random import Random
from tests.fuzz.gate import Case, Kind, run

class Planted(Kind):
    name = "planted"
    def make(self, random):
        return Case("planted", {"file": b"x"})
    def use(self, case, folder):
        if FAULT == "TypeError": return None + 1
        if FAULT == "hangs": time.sleep(60)
        if FAULT == "computes":
            while True: pass
        if FAULT == "memory": bytearray(b"x") * 150_000_000
        if FAULT == "much memory": return bytearray(2**40)
        if FAULT == "file": (folder / ".draft").touch(); raise ValueError("the file is not what it should be")
        if FAULT == "temporary": import tempfile; tempfile.mkdtemp()
        if FAULT == "crash": os.kill(os.getpid(), 11)
        if FAULT == "mute": raise ValueError("3")
        if FAULT == "judge": return 1
        if FAULT == "refuses": raise ValueError("the file is not what it should be")
        (folder / "output").mkdir()
    def judge(self, case, result):
        return "it is wrong" if result else None

for FAULT in FAULTS:
    seconds = 0.5 if FAULT in ("hangs", "computes") else 30
    outcomes = run(Planted(), range(3), seed=0, seconds=seconds, most_bytes=100_000_000)
    print(json.dumps([FAULT, sorted([outcome.number, outcome.verdict] for outcome in outcomes)]))
"""
VERDICTS = {
    "TypeError": "traceback of TypeError",
    "hangs": "hang",
    "computes": "hang",
    "memory": "memory",
    "much memory": "memory",
    "file": "left behind",
    "temporary": "left behind",
    "crash": "crash",
    "mute": "no sentence",
    "judge": "wrongly accepted",
    "refuses": "refused",
    "none": "accepted",
}


def test_the_gate_catches_planted_faults():
    result = finish(start(f"FAULTS = {list(VERDICTS)}\n{PLANTED}"))
    found = dict(map(json.loads, result.stdout.splitlines()))
    assert found == {fault: [[number, verdict] for number in range(3)] for fault, verdict in VERDICTS.items()}


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_mutated_inputs_of_every_kind(tmp_path, count):
    command = [sys.executable, "-m", "tests.fuzz", "--count", str(count), "--output", str(tmp_path / "findings")]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not (tmp_path / "findings").exists()
    assert result.stdout.count(f"| {count} |") == 15
