"""The wheel, installed in an environment of its own and used from an empty folder, without the checkout."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from ..doc_fixtures import write_data_set
from ..paths import ROOT
from ..tiny_models import save_tiny
from .versions import build_wheel

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
# Everything else that is installed here, but not the package, because .pth files in these folders are not read.
OTHERS = "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))
FEW_STEPS = "--epochs 1 --warmup-steps 0 --batch-size 4 --num-workers 0 --report-to none --image-size 24".split()


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


@pytest.fixture
def run(programs, tmp_path):
    """Run a program of the environment in a folder, without this checkout on the path."""

    def run(name: str, *arguments, status: int = 0) -> str:
        environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
        command = [str(programs / name), *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout if status == 0 else done.stderr

    return run


def test_pyproject_lists_every_package():
    names = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "hf_vit").rglob("__init__.py")]
    assert {folder.replace("/", ".") for folder in folders} - set(names) == set()


@pytest.mark.slow
def test_the_wheel_has_everything_that_a_command_reads(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder, inside in (("hf_vit", "hf_vit"), ("training", "hf_vit/scripts")):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert {f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in files} <= names


@pytest.mark.slow
def test_from_images_to_a_model_in_an_empty_folder(run, tmp_path):
    assert run("hf-vit", "--version").startswith("hf-vit ")
    assert "finetune_small\n" in run("hf-vit", "recipes")
    save_tiny(tmp_path / "tiny")
    write_data_set(tmp_path / "photographs")
    run("hf-vit", "finetune", "--recipe", "finetune_small", "--model", "tiny", "--dataset", "photographs",
        "--output-dir", "out", *FEW_STEPS)  # fmt: skip
    answer = json.loads(run("hf-vit", "predict", "out", "photographs/test/tench/0.png", "--json"))
    assert {entry["label"] for entry in answer["predictions"]} == {"tench", "goldfish"}
    template = run("hf-vit", "launch-configs", "path", "cpu").strip()
    assert "hf_vit/scripts/accelerate" in template
    launch = ("--config_file", template, "-m", "hf_vit.scripts.evaluate")
    run("python", "-m", "accelerate.commands.launch", *launch, "--model", "out", "--dataset", "photographs",
        "--split", "test", "--num-workers", "0", "--output-dir", "results")  # fmt: skip
    assert json.loads((tmp_path / "results" / "metrics.json").read_text())["samples"] == 6
