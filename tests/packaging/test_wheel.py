"""The wheel, installed in an environment of its own and used from an empty folder, without the checkout."""

import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from hf_vit.cli import main

from ..paths import ROOT
from ..tiny_models import save_tiny
from .commands import CHECKS, Check, run_checks
from .versions import build_wheel

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
# Everything else that is installed here, but not the package, because .pth files in these folders are not read.
OTHERS = "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), "--no-build-isolation")


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """The folder of the programs of an environment that has the wheel, and from this one everything else."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", wheel], env=ENVIRONMENT, check=True)
    own = next(environment.glob("lib/*/site-packages"))
    (own / "others.pth").write_text(OTHERS)
    return python.parent


def test_the_wheel_has_everything_that_a_command_reads(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder, inside in (("hf_vit", "hf_vit"), ("training", "hf_vit/scripts")):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in files} <= names


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "openvino"])
def test_an_exported_program_needs_four_packages(wheel, to, tmp_path):
    """NumPy, Pillow, simplejpeg and a runtime are all that the environment has besides the wheel."""
    runtime = pytest.importorskip({"onnx": "onnxruntime", "openvino": "openvino"}[to])
    save_tiny(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "deployed"), "--to", to]) == 0
    Image.new("RGB", (36, 20)).save(tmp_path / "image.png")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"], check=True)
    python = tmp_path / "environment" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", wheel], env=ENVIRONMENT, check=True)
    own = next((tmp_path / "environment").glob("lib/*/site-packages"))
    for name in ("numpy", "PIL", "simplejpeg", runtime.__name__):
        package = Path(str(importlib.import_module(name).__file__)).parent
        libraries = package.with_name(f"{name.replace('PIL', 'pillow')}.libs")
        for path in (package, libraries):
            if path.exists():
                (own / path.name).symlink_to(path)
    for line in (f"predict {tmp_path}/deployed image.png", f"embed {tmp_path}/deployed image.png --output out.npz"):
        command = [python.parent / "hf-vit", *line.split()]
        done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "deployed", "environment", "image.png", "out.npz"}


@pytest.mark.slow
def test_from_images_to_a_model_in_an_empty_folder(programs):
    template = next(programs.parent.glob("lib/*/site-packages/hf_vit/scripts/accelerate/cpu.yaml"))
    launch = f"python -m accelerate.commands.launch --config_file {template} -m hf_vit.scripts.evaluate"
    first = ("hf-vit --version", "hf-vit recipes", "hf-vit launch-configs", "hf-vit convert vit", "hf-vit finetune")
    checks = [check for check in CHECKS if check.command.startswith(first) and check.extra in (None, "training")]
    checks.append(Check("hf-vit predict tuned photographs/val/bees/0.jpg --json", '"bees"'))
    checks.append(Check(f"{launch} --model tuned --dataset photographs --split validation --num-workers 0", "accuracy"))
    results = run_checks(programs, ("training",), checks)
    assert len(results) == 8
    assert [result for result in results if result.word != "passed"] == []
