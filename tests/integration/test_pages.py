"""Every fenced command and every block of Python of the README and the documentation, a folder for each page.

What a page names stands ready there, small: addresses of Google's and of the Hub lead to tiny models. A block that
does not run so fails the test; a new one is run without being entered anywhere.
"""

import ast
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

from hf_vit.catalog import address_of
from hf_vit.cli import main
from hf_vit.files.download import sha256_of

from ..doc_fixtures import FEW_STEPS
from ..paths import ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "skills/hf-vit/SKILL.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]
CAT = "https://huggingface.co/datasets/huggingface/documentation-images/resolve/main/pipeline-cat-chonk.jpeg"
TIDIED = "hf-vit finetune --model ti16 --dataset FOLDER"
# What is run in place of a line; None for what is not run here.
INSTEAD = {
    "git clone <this repository> && cd hf_vit": None,
    # The images of the test resemble each other, so that all would be left out.
    f"{TIDIED} --exclude audit/issues.csv --relabel audit/issues.csv --output-dir out --epochs 5": (
        f"{TIDIED} --relabel audit/issues.csv --output-dir out --epochs 5"
    ),
    "python -m http.server --directory page": None,  # serves until it is interrupted
    "hf-vit export ti16 ti16.pt2 --to aot-inductor": None,  # compiles for long; test_programs.py does
    f"hf-vit predict ti16 {CAT}": None,  # needs a network; tests/models/test_utils_addresses.py reads addresses
}
SHORTER = {
    "digits": f"{FEW_STEPS} --eval_split null",
    "finetune_small": FEW_STEPS,
    "masked_patch_prediction_small": FEW_STEPS,
    "bit_hyperrule_small": f"{FEW_STEPS} --decay_steps [1] --image_size 64 --resize 70",
    "benchmark": "--seconds 0",
    "quantize": "--min-agreement 0",  # of a model that was never trained
    "paper_i21k_b16": "--print_config",  # eight GPUs and ImageNet-21k
    "few_shot": "--shots [1,2] --seeds 1",
    "real": "--real_labels real.json",  # or they would be downloaded
    "vtab": "--tasks [caltech101] --finetune '{steps: 2, warmup_steps: 0, batch_size: 4, image_size: 32, resize: 40}'",
}
SUBSTITUTION = re.compile(r"\$\(hf-vit (.*?)\)")  # of a command by what it prints
PLACEHOLDERS = {"...": "FOLDER"}  # of arguments
# Packages of Python blocks that no extra brings: timm needs torchvision, whose wheel on the package index is made for a
# torch with CUDA, and the others follow versions of torch and transformers of their own. Where they are installed
# (a venv over this one) the blocks run: seen with timm 1.0.31, torchao 0.18.0 and sentence-transformers 6.2.0.
NEEDS = {name: f"{name} is not installed" for name in ("sentence_transformers", "timm", "torchao")}


class Block(NamedTuple):
    language: str  # "" for a shell
    text: str

    def commands(self) -> list[str]:
        lines = (line.split(" #")[0].strip() for line in self.text.replace("\\\n", " ").splitlines())
        return [line for line in lines if line]


def read_blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    blocks = [Block(*found) for found in FENCE.findall(text)]
    assert 2 * len(blocks) == text.count("```"), "a fence is written so that this test does not see its block"
    return [block for block in blocks if block.language not in ("text", "js")]  # for node: test_web.py


def commands_of(page: str) -> list[str]:
    return [line for block in read_blocks(page) if block.language == "bash" for line in block.commands()]


class Reader:
    """Somebody who follows a page in a folder."""

    def __init__(self, folder: Path, client):
        self.folder, self.client = folder, client

    def run_python(self, code: str) -> str:
        return self.client(f"import os\nos.chdir({str(self.folder)!r})\n{code}", token="hf_me")

    def run_command(self, command: str) -> None:
        command = INSTEAD.get(command, command)
        if command is None:
            return
        command = SUBSTITUTION.sub(lambda found: f"'{self.run_python(print_of(found[1]))}'", command)
        program, *arguments = (PLACEHOLDERS.get(word, word) for word in shlex.split(command))
        runners = {"hf-vit": self.hf_vit, "accelerate": self.accelerate, "make": self.make, "pip": self.pip}
        assert program in runners, f"the test of the pages does not know how to run: {command}"
        runners[program](arguments)

    def hf_vit(self, arguments: list[str]) -> None:
        code = f"from hf_vit.cli import main\nstatus = main({self.shorten(arguments)!r})\nassert status == 0, status"
        run = self.show_page if arguments[0] == "demo" else self.run_python
        run(code)

    def show_page(self, code: str) -> None:
        """Until it is there; its reader ends it with Ctrl+C."""
        if find_spec("gradio") is None:
            return
        running = self.client.begin(f"import os\nos.chdir({str(self.folder)!r})\n{code}")
        output = running.folder / "output"
        while running.is_running() and not (output.exists() and "is shown at http://" in output.read_text()):
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGINT)
        printed, error = running.wait()
        assert running.status == 0, printed + error

    def accelerate(self, arguments: list[str]) -> None:
        """As the launcher reads it, on one process."""
        assert arguments[0] == "launch"
        parse = f"""
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
arguments = launch_command_parser().parse_args({self.shorten(arguments[1:])!r})
_validate_launch_command(arguments)
script, arguments = arguments.training_script, arguments.training_script_args
"""
        self.run_python(parse + RUN_MODULE)

    def shorten(self, arguments: list[str]) -> list[str]:
        known = [name for name in SHORTER if name in arguments]
        return [*arguments, *(word for name in known for word in shlex.split(SHORTER[name]))]

    def make(self, arguments: list[str]) -> None:
        subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)

    def pip(self, arguments: list[str]) -> None:
        """Only that the extras are declared."""
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert arguments[0] == "install"
        for wanted in re.findall(r"\[(.*)\]", arguments[-1]):
            assert set(wanted.split(",")) <= set(extras), wanted


RUN_MODULE = """
import os, runpy, sys
os.environ["ACCELERATE_USE_CPU"] = "true"
sys.argv = [script, *arguments]
runpy.run_module(script, run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def reader(page, hub, client, doc_fixtures, tmp_path):
    """In a folder that has what the page takes for granted, but not yet what it makes itself."""
    folder = tmp_path / "checkout"
    shutil.copytree(doc_fixtures / "folder", folder)
    for made in re.findall(r"^hf-vit convert \S+ ([\w-]+)", "\n".join(commands_of(page)), re.MULTILINE):
        shutil.rmtree(folder / made, ignore_errors=True)
    text = (ROOT / page).read_text()
    stand_in_for_google(client, doc_fixtures, text)
    stand_in_for_the_hub(client, doc_fixtures, text)
    yield Reader(folder, client)
    shutil.rmtree(assets(client), ignore_errors=True)


def print_of(arguments: str) -> str:
    return f"from hf_vit.cli import main\nmain({shlex.split(arguments)!r})"


def assets(client) -> Path:
    """Where the client keeps what it downloaded, by the sha256 of the address."""
    return client.folder / "home" / "assets" / "hf_vit" / "downloads"


def stand_in_for_google(client, doc_fixtures: Path, text: str) -> None:
    """As if what the page fetches had been downloaded already."""
    addresses = set(re.findall(r"gs://[\w./-]+(?:npz|csv)\b", text))
    addresses |= {address_of(name) for name in re.findall(r"augreg:[\w:/+-]+", text)}
    for address in addresses:
        https = address.replace("gs://", "https://storage.googleapis.com/")
        place = assets(client) / hashlib.sha256(https.encode()).hexdigest() / PurePosixPath(address).name
        place.parent.mkdir(parents=True)
        vit = doc_fixtures / "folder" / "Ti_16-....npz"
        small = doc_fixtures / "index.csv" if address.endswith(".csv") else vit
        shutil.copyfile(doc_fixtures / "bit.npz" if "bit_models" in address else small, place)
        record = {"url": https, "etag": None, "size": place.stat().st_size, "sha256": sha256_of(place)}
        place.with_name(f"{place.name}.json").write_text(json.dumps(record))


def stand_in_for_the_hub(client, doc_fixtures: Path, text: str) -> None:
    """Repositories that the page names."""
    images = doc_fixtures / "folder" / "FOLDER" / "test"
    stored = {
        "google/vit-base-patch16-224": ("model", doc_fixtures / "theirs", "."),
        "ILSVRC/imagenet-1k": ("dataset", images, "validation"),
        "AI-Lab-Makerere/beans": ("dataset", images, "test"),
    }
    lines = [
        f"""
        HfApi().create_repo({name!r}, repo_type={kind!r})
        HfApi().upload_folder(repo_id={name!r}, repo_type={kind!r}, folder_path={str(folder)!r}, path_in_repo={place!r})
        """
        for name, (kind, folder, place) in stored.items()
        if name in text
    ]
    if lines:
        client("\n        from huggingface_hub import HfApi\n" + "".join(lines), token="hf_me")


POSSESSIONS = """
import torch
import hf_vit
from PIL import Image
images = [Image.effect_noise((90, 60), 80).convert("RGB"), Image.effect_noise((50, 70), 80)]
image, pixel_values = torch.rand(96, 64, 3).numpy(), torch.rand(1, 3, 96, 64)
data_loader = [pixel_values]
model = hf_vit.HfViTForImageClassification.from_pretrained("ti16")
"""


def prelude(blocks: list[Block]) -> str:
    """What somebody who reads on has imported, and pictures of theirs."""
    statements = [node for block in blocks if block.language == "python" for node in ast.parse(block.text).body]
    imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    lines = [ast.unparse(node) for node in imports if not missing_package(ast.unparse(node))]
    uses_model = any("model" in block.text for block in blocks)
    return "\n".join([*lines, POSSESSIONS if uses_model else "", ""])


def missing_package(code: str) -> str | None:
    imported = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    return next((reason for package, reason in NEEDS.items() if package in imported and not find_spec(package)), None)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if read_blocks(page)])
def test_every_block_of_a_page_runs(page, reader):
    blocks = read_blocks(page)
    imports = prelude(blocks)
    for block in blocks:
        assert block.language in ("bash", "python"), f"nobody runs blocks of {block.language!r}:\n{block.text}"
        if block.language == "bash":
            for command in block.commands():
                reader.run_command(command)
        elif not missing_package(block.text):
            reader.run_python(imports + block.text)


def test_options_in_the_text_of_a_page_exist(capsys):
    """In a command such as `hf-vit push --license`; whole blocks run above."""
    helps: dict[str, str] = {}
    for page in PAGES:
        for command, rest in re.findall(r"`hf-vit ([a-z-]+)([^`\n]*)`", (ROOT / page).read_text()):
            for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", rest):
                if command not in helps:
                    with suppress(SystemExit):
                        main([command, "--help"])
                    helps[command] = capsys.readouterr().out
                assert option.replace("_", "-") in helps[command].replace("_", "-"), f"{page}: hf-vit {command}{rest}"
