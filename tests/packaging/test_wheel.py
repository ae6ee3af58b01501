"""The wheel, installed in an environment of its own and used from an empty folder, without the checkout."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from PIL import Image

from hf_vit.prediction import predict

from ..doc_fixtures import write_data_set
from ..paths import ROOT
from ..tiny_models import save_tiny
from .versions import build_wheel

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
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
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # whose .pth files are not read
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


@pytest.mark.slow
def test_a_space_installs_the_wheel_beside_it_and_answers(run, wheel, tmp_path):
    """In an environment without hf_vit, from an empty folder, as the Hub starts it."""
    client = pytest.importorskip("gradio_client")
    save_tiny(tmp_path / "tiny")
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    run("hf-vit", "demo", "tiny", "--space", "space", "--wheel", wheel)
    run("hf-vit", "demo", "tiny", "--space", "space", "--wheel", wheel, "--overwrite")
    metadata = yaml.safe_load((tmp_path / "space" / "README.md").read_text().split("---")[1])
    assert {**metadata, "sdk": "gradio", "sdk_version": version("gradio"), "app_file": "app.py"} == metadata
    needed = {Requirement(line).name for line in (tmp_path / "space" / "requirements.txt").read_text().splitlines()}
    assert {"torch", "transformers", "gradio", "datasets", "matplotlib"} <= needed
    assert "hf_vit" not in needed

    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    packages = next((tmp_path / "bare").glob("lib/*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "empty").mkdir()
    command = [tmp_path / "bare" / "bin" / "python", tmp_path / "space" / "app.py"]
    (tmp_path / "temporary").mkdir()
    environment = {**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(command, cwd=tmp_path / "empty", env=environment, stdout=subprocess.PIPE, text=True) as page:
        try:
            assert page.stdout is not None
            address = page.stdout.readline().split(" is shown at ")[1].split()[0]
            classes, shown = client.Client(address, verbose=False, download_files=tmp_path / "answers").predict(
                client.handle_file(tmp_path / "red.png"), api_name="/look"
            )
            assert list((tmp_path / "temporary").rglob("red.png"))
        finally:
            page.terminate()
    assert page.returncode == 128 + signal.SIGTERM
    left = [path for path in (tmp_path / "temporary").rglob("*") if path.is_file()]
    assert not left
    ((entry, *_),) = predict(tmp_path / "tiny", [tmp_path / "red.png"])
    assert classes["label"] == entry.label
    with Image.open(shown) as image:
        assert image.size == (36 * 22, 20 * 22)
