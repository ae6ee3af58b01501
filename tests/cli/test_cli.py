"""The command line: its output; bad input gives one sentence, status 2, and leaves no files."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.files.messages import user_errors

from ..paths import ROOT
from ..processes import finish, start


def test_convert_predict_export(goldens, tmp_path, run_command):
    folder, back, photograph = (tmp_path / name for name in ("folder", "back.npz", "photograph.png"))
    Image.effect_noise((45, 31), 80).save(photograph)
    assert "24,234" in run_command(["convert", goldens / "vit_token.npz", folder])
    printed = run_command(["predict", folder, photograph, photograph, "--top-k", 3, "--json"])
    lines = [json.loads(line) for line in printed.splitlines()]
    assert len(lines) == 2
    scores = [prediction["score"] for prediction in lines[0]["predictions"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3
    assert run_command(["predict", folder, photograph]).count("LABEL_") == 5
    run_command(["export", folder, back, "--to", "jax"])
    assert "(48, 24)" in run_command(["convert", back, folder, "--overwrite", "--image-size", "48x24"])
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "back.npz", "photograph.png"}
    assert "(16, 64)" in run_command(["convert", back, folder, "--overwrite", "--position-grid", "2x8"])


@pytest.mark.parametrize(("output", "status", "said"), [
    ("pipe", 141, ""),
    ("/dev/full", 2, "hf-vit launch-configs: No space left on device\n"),
])  # fmt: skip
def test_standard_output_that_takes_nothing(output, status, said):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") if output == "pipe" else open(output, "w") as file:
        command = [sys.executable, "-c", "import hf_vit_command; raise SystemExit(hf_vit_command.main())"]
        done = subprocess.run([*command, "launch-configs"], stdout=file, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (status, said)


@pytest.mark.parametrize("allocate", [lambda: torch.empty(2**50), lambda: np.empty(2**50), lambda: bytearray(2**60)])
def test_too_little_memory_is_one_sentence(allocate, capsys):
    with pytest.raises(SystemExit, match="2"), user_errors("hf-vit predict"):
        allocate()
    said = capsys.readouterr().err
    assert said.startswith("hf-vit predict: ")
    assert said.count("\n") == 1


def test_a_full_disk_leaves_nothing(goldens, tmp_path):
    """The limit on the size of a file stands in for a full disk: the write fails in the middle."""
    arguments = ["convert", str(goldens / "vit_token.npz"), str(tmp_path / "out")]
    code = f"""
import resource, signal
import hf_vit.conversion, hf_vit.loading
from hf_vit.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
raise SystemExit(main({arguments!r}))
"""
    done = finish(start(code), check=False)
    assert done.returncode == 2, done.stderr
    assert "File too large" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["convert", "export"])
def test_the_scripts_are_the_commands(script):
    path = str(ROOT / "conversion" / f"{script}.py")
    done = finish(
        start(f"import runpy, sys\nsys.argv = [{path!r}, '--help']\nrunpy.run_path({path!r}, run_name='__main__')")
    )
    assert f"hf-vit {script}" in done.stdout
