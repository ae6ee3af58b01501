"""What the documentation shows runs: commands and Python of the pages, cells of the notebooks, examples of docstrings.

What a page names is there, small: addresses of Google's and of the Hub lead to tiny models. A new block is run without
an entry here; blocks of other languages and lines of other programs are not.
"""

import ast
import doctest
import hashlib
import json
import pkgutil
import re
import runpy
import shlex
import shutil
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest
from PIL import Image

from hf_vit import HfViTImageProcessor
from hf_vit.catalog import address_of
from hf_vit.cli import main
from hf_vit.cli.command_line import SCRIPTS
from hf_vit.files.manifest import sha256_of
from hf_vit.loading import save_folder

from ..doc_fixtures import FEW_STEPS, write_data_set
from ..paths import ROOT
from ..tiny_models import tiny

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))
OWN_TESTS = ("docs/frameworks.md",)  # pages whose blocks another test runs
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
NOT_RUN = re.compile("predict .* https:")  # needs a network
# Of the images of the fixtures, which resemble each other, all would be left out.
REMOVED = "--exclude audit/issues.csv"
SHORTER = {  # word of a command line -> options that make its run short
    "auto": FEW_STEPS,
    "digits": f"{FEW_STEPS} --eval_split null",
    "finetune_small": FEW_STEPS,
    "masked_patch_prediction_small": FEW_STEPS,
    "bit_hyperrule": f"{FEW_STEPS} --decay_steps [1] --image_size 64 --resize 70",
    "benchmark": "--seconds 0",
    "demo": "--static shown --overwrite",  # or it would be served until Ctrl+C, see tests/demo
    "quantize": "--min-agreement 0",  # of a model that was never trained
    "paper_i21k": "--print_config",  # eight GPUs and ImageNet-21k
    "few_shot": "--shots [1,2] --seeds 1",
    "real": "--real_labels real.json",  # or they would be downloaded
    "vtab": "--tasks [caltech101] --finetune '{steps: 2, warmup_steps: 0, batch_size: 4, image_size: 32, resize: 40}'",
}
SUBSTITUTION = re.compile(r"\$\(hf-vit (.*?)\)")  # of a command by what it prints
# Packages of Python blocks that no extra installs.
OPTIONAL = (
    "sentence_transformers",
    "timm",
    "torchao",
    "ray",
    "daft",
    "pyspark",
    "litserve",
    "faiss",
    "usearch",
    "lancedb",
)


def read_blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block that runs."""
    return [block for block in FENCE.findall((ROOT / page).read_text()) if block[0] in ("bash", "python")]


def commands_of(text: str) -> list[str]:
    lines = (line.split(" #")[0].strip() for line in text.replace("\\\n", " ").splitlines())
    return [line.replace(REMOVED, "") for line in lines if line and not NOT_RUN.search(line)]


class Reader:
    """Runs what a page says, in a folder."""

    def __init__(self, folder: Path, client):
        self.folder, self.client = folder, client

    def run_python(self, code: str) -> str:
        return self.client(f"import os\nos.chdir({str(self.folder)!r})\n{code}", token="hf_me")

    def run_command(self, command: str) -> None:
        command = SUBSTITUTION.sub(lambda found: f"'{self.client(shlex.split(found[1]), token='hf_me')}'", command)
        program, *arguments = ("FOLDER" if word == "..." else word for word in shlex.split(command))
        arguments += [word for name in SHORTER if name in arguments for word in shlex.split(SHORTER[name])]
        if program == "accelerate":
            self.run_python(LAUNCH.format(arguments=arguments[1:]))
        elif program == "hf-vit":
            self.run_python(f"from hf_vit.cli import main\nstatus = main({arguments!r})\nassert status == 0, status")


# `accelerate launch` on one process.
LAUNCH = """
import os, runpy, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
arguments = launch_command_parser().parse_args({arguments!r})
_validate_launch_command(arguments)
os.environ["ACCELERATE_USE_CPU"] = "true"
sys.argv = [arguments.training_script, *arguments.training_script_args]
runpy.run_module(arguments.training_script, run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def reader(page, hub, client, doc_fixtures, tmp_path):
    """In a folder that has what the page expects, but not what it makes itself."""
    folder = tmp_path / "checkout"
    shutil.copytree(doc_fixtures / "folder", folder)
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("*.md", "*.py", "*.ipynb"))
    text = (ROOT / page).read_text()
    for made in re.findall(r"^hf-vit convert \S+ ([\w-]+)", text, re.MULTILINE):
        shutil.rmtree(folder / made, ignore_errors=True)
    replace_downloads(client, doc_fixtures, text)
    fill_hub(client, doc_fixtures, text)
    yield Reader(folder, client)
    shutil.rmtree(assets(client), ignore_errors=True)


def assets(client) -> Path:
    """Where the client keeps what it downloaded, by the sha256 of the address."""
    return client.folder / "home" / "assets" / "hf_vit" / "downloads"


def replace_downloads(client, doc_fixtures: Path, text: str) -> None:
    """Put small files where the page's downloads from Google are cached."""
    addresses = set(re.findall(r"gs://[\w./-]+(?:npz|csv)\b", text))
    addresses |= {address_of(name) for name in re.findall(r"augreg:[\w:/+-]+", text)}
    for address in addresses:
        https = address.replace("gs://", "https://storage.googleapis.com/")
        path = assets(client) / hashlib.sha256(https.encode()).hexdigest() / PurePosixPath(address).name
        path.parent.mkdir(parents=True)
        vit = doc_fixtures / "folder" / "Ti_16-....npz"
        small = doc_fixtures / "index.csv" if address.endswith(".csv") else vit
        shutil.copyfile(doc_fixtures / "bit.npz" if "bit_models" in address else small, path)
        record = {"url": https, "etag": None, "size": path.stat().st_size, "sha256": sha256_of(path)}
        path.with_name(f"{path.name}.json").write_text(json.dumps(record))


def fill_hub(client, doc_fixtures: Path, text: str) -> None:
    """Create the repositories that the page names."""
    images = doc_fixtures / "folder" / "FOLDER" / "test"
    stored = {
        "google/vit-base-patch16-224": ("model", doc_fixtures / "theirs", "."),
        "ILSVRC/imagenet-1k": ("dataset", images, "validation"),
        "AI-Lab-Makerere/beans": ("dataset", images, "test"),
    }
    for name, (kind, folder, path) in stored.items():
        if name in text:
            of, what = {"repo_id": name, "repo_type": kind}, {"folder_path": str(folder), "path_in_repo": path}
            calls = f"HfApi().create_repo(**{of})\nHfApi().upload_folder(**{of | what})"
            client(f"from huggingface_hub import HfApi\n{calls}", token="hf_me")


VARIABLES = """
import torch
import hf_vit
from PIL import Image
images = [Image.effect_noise((90, 60), 80).convert("RGB"), Image.effect_noise((50, 70), 80)]
image, pixel_values = torch.rand(96, 64, 3).numpy(), torch.rand(1, 3, 96, 64)
data_loader = [pixel_values]
model = hf_vit.HfViTForImageClassification.from_pretrained("ti16")
"""


def prelude(blocks: list[tuple[str, str]]) -> str:
    """The imports of all Python blocks of a page, and variables that they use."""
    statements = [node for language, text in blocks if language == "python" for node in ast.parse(text).body]
    imports = [ast.unparse(node) for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    uses_model = any("model" in text for _, text in blocks)
    lines = [line for line in imports if not needs_missing_package(line)]
    return "\n".join([*lines, VARIABLES if uses_model else "", ""])


def needs_missing_package(code: str) -> bool:
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    return any(package in imported and not find_spec(package) for package in OPTIONAL)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in OWN_TESTS and read_blocks(page)])
def test_every_block_of_a_page_runs(page, reader):
    blocks = read_blocks(page)
    imports = prelude(blocks)
    for language, text in blocks:
        if language == "bash":
            for command in commands_of(text):
                reader.run_command(command)
        elif not needs_missing_package(text):
            reader.run_python(imports + text)


def test_the_skill_is_made_of_pages_that_run():
    docs = runpy.run_path(str(ROOT / "docs" / "skill.py"))
    assert docs["SKILL"].read_text() == docs["skill"]()


def test_options_in_the_text_of_a_page_exist(capsys):
    """In a command such as `hf-vit push --license`; whole blocks run above."""
    helps: dict[str, str] = {}
    for page in PAGES:
        for command, rest in re.findall(r"`hf-vit ([a-z-]+)([^`\n]*)`", (ROOT / page).read_text()):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", rest):
                if command not in helps:
                    with suppress(SystemExit):
                        main([command, "--help", *(["all"] if command in SCRIPTS else [])])
                    helps[command] = capsys.readouterr().out
                assert option.replace("_", "-") in helps[command].replace("_", "-"), f"{page}: hf-vit {command}{rest}"


# Runs cells one after the other in one process; a line that begins with `!` is a command of hf-vit.
RUN_CELLS = """
import os
import shlex
import hf_vit
import yaml
from hf_vit.cli import main

def run_command(line):
    program, *arguments = shlex.split(line)
    shorter = {shorter!r}.get(arguments[0], "")
    assert main([*arguments, *shlex.split(shorter)]) == 0, line

def with_few_steps(function, text):
    words = shlex.split(text)
    fewer = {{name.removeprefix("--"): yaml.safe_load(value) for name, value in zip(words[::2], words[1::2])}}
    return lambda *arguments, **settings: function(*arguments, **{{**settings, **fewer}})

for name, text in {shorter!r}.items():
    setattr(hf_vit, name, with_few_steps(getattr(hf_vit, name), text))

os.chdir({folder!r})
names = {{"__name__": "__main__", "run_command": run_command}}
for number, cell in enumerate({cells!r}, 1):
    exec(compile(cell, f"code cell {{number}}", "exec"), names)
"""
SHORTER_FUNCTIONS = {"finetune": FEW_STEPS, "pretrain": FEW_STEPS, "evaluate": "--shots [1] --seeds 1"}


def as_python(cell: dict) -> str:
    """The code of a cell, without magics of Jupyter."""
    lines = "".join(cell["source"]).replace("\\\n", " ").splitlines()
    commands = (re.sub(r"^( *)!(.*)", lambda found: f"{found[1]}run_command(f{found[2]!r})", line) for line in lines)
    return "\n".join("" if line.startswith("%") else line for line in commands)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(notebook, hub, client, doc_fixtures, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(doc_fixtures / "folder", folder)
    write_data_set(folder / "flowers")
    cells = [as_python(cell) for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    if any(re.search(r"""npz.*(?:save\("| )ti16\b""", cell) for cell in cells):  # it makes this folder
        shutil.rmtree(folder / "ti16")
    client(RUN_CELLS.format(shorter=SHORTER_FUNCTIONS, folder=str(folder), cells=cells), token="hf_me")


@pytest.mark.parametrize("package", ["models", "analysis", "runtimes", "hub"])
def test_examples_of_docstrings_run(package, tmp_path, monkeypatch):
    """They use a small model in `folder` and a picture in `photo.png`."""
    model = tiny(image_size=32, patch_size=16)
    save_folder(tmp_path / "folder", model, HfViTImageProcessor.for_model(model.config, preset="vit_jax"))
    Image.new("RGB", (53, 37), (200, 30, 90)).save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report: list[str] = []
    for module in pkgutil.iter_modules(import_module(f"hf_vit.{package}").__path__, f"hf_vit.{package}."):
        for example in finder.find(import_module(module.name)):
            runner.run(example, out=report.append)
    assert runner.tries
    assert not runner.failures, "".join(report)
