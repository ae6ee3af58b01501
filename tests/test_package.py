"""`import hf_vit`: public names and their types; what the command `hf-vit` imports."""

import ast
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image

import hf_vit
from hf_vit.cli.command_line import build_parser, commands_of, main

from .paths import GOLDENS, ROOT
from .tiny_models import save_tiny

# What pip writes for an entry of [project.scripts]; its arguments are command lines, which it runs in turn.
CONSOLE_SCRIPT = """\
import shlex, sys
from {module} import {function}
for line in sys.argv[1:]:
    sys.argv = ["hf-vit", *shlex.split(line)]
    status = {function}()
    if status:
        sys.exit(status)
print("heavy:", sorted({{"torch", "transformers", "huggingface_hub", "numpy", "PIL"}} & set(sys.modules)))
print("needless:", sorted({needless!r} & set(sys.modules)))
"""
# Packages that may be installed, take long to import, and serve neither `convert` nor `predict`.
NEEDLESS = set("datasets evaluate matplotlib onnx onnxruntime openvino pandas peft pyarrow sklearn".split())


def run(script: Path, *arguments, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **variables}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=script.parent)


@pytest.fixture
def console_script(tmp_path):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["hf-vit"].split(":")
    script = tmp_path / "hf-vit"
    script.write_text(CONSOLE_SCRIPT.format(module=module, function=function, needless=NEEDLESS))
    return script


def test_help_imports_no_library(console_script):
    names = ["", *commands_of(build_parser())]
    done = run(console_script, *(f"{name} --help" for name in names))
    assert done.returncode == 0, done.stderr
    for name in names:
        assert f"usage: hf-vit {name}".strip() in done.stdout
    assert "heavy: []" in done.stdout


@pytest.mark.slow
def test_a_command_imports_only_what_it_needs(console_script, tmp_path):
    image, model = tmp_path / "image.png", tmp_path / "model"
    Image.new("RGB", (36, 20)).save(image)
    for arguments in (("convert", GOLDENS / "vit_token.npz", model), ("predict", model, image)):
        done = run(console_script, shlex.join(map(str, arguments)))
        assert done.returncode == 0, done.stderr
        assert "needless: []" in done.stdout


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "9"}, "None")],
)
def test_threads_sleep_unless_the_user_sets_how_they_wait(given, expected, console_script):
    console_script.write_text(f"{console_script.read_text()}\nimport os\nprint(os.environ.get('OMP_WAIT_POLICY'))")
    assert run(console_script, "--version", **given).stdout.split()[-1] == expected


def test_an_exported_program_needs_no_torch(console_script, tmp_path):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    save_tiny(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "deployed"), "--to", "onnx"]) == 0
    Image.new("RGB", (36, 20)).save(tmp_path / "image.png")
    options = ["--threshold auto", "--json", f"--output {tmp_path / 'classes.csv'}"]
    lines = [f"predict {tmp_path}/deployed {tmp_path}/image.png {option}" for option in options]
    lines.append(f"embed {tmp_path}/deployed {tmp_path}/image.png --output {tmp_path}/features.npz")
    done = run(console_script, *lines)
    assert done.returncode == 0, done.stderr
    assert "heavy: ['PIL', 'numpy']" in done.stdout


@pytest.mark.slow
def test_a_script_may_be_called_as_the_command(tmp_path):
    save_tiny(tmp_path / "model")
    script = tmp_path / "hf-vit.py"
    script.write_text(
        "import sys, hf_vit, transformers\n"
        "print(type(transformers.AutoModel.from_pretrained(sys.argv[1])).__name__)\n"
        "print(type(transformers.AutoImageProcessor.from_pretrained(sys.argv[1])).__name__)\n"
    )
    done = run(script, tmp_path / "model")
    assert done.stdout.split() == ["HfViTModel", "HfViTImageProcessor"], done.stderr


def test_every_public_name_exists_and_has_a_type():
    """The types are imported for editors alone."""
    tree = ast.parse(Path(hf_vit.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    assert {alias.asname for node in block.body for alias in node.names} == set(hf_vit.__all__) - {"__version__"}
    for name in hf_vit.__all__:
        assert getattr(hf_vit, name) is not None
