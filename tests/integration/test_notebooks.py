"""The notebooks of the documentation: every cell runs, with small models in place of the real ones."""

import json
import re
import shutil
from pathlib import Path

import pytest

from ..doc_fixtures import FEW_STEPS, write_data_set
from ..paths import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|tmp|root|home|opt|usr)/|ipykernel_")
# Runs cells one after the other in one process; a line that begins with `!` is a command of hf-vit.
RUN_CELLS = """
import os
import shlex
import hf_vit
import yaml
from hf_vit.cli import main

def run_command(line):
    program, *arguments = shlex.split(line)
    assert program == "hf-vit", f"the test of the notebooks does not know how to run: {{line}}"
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
SHORTER = {"finetune": FEW_STEPS, "pretrain": FEW_STEPS, "evaluate": "--shots [1] --seeds 1"}


def cells_of(notebook: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


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
    cells = [as_python(cell) for cell in cells_of(notebook, "code")]
    makes_it = any(re.search(r"""(?:npz", "|npz" )ti16\b""", cell) for cell in cells)
    if makes_it:
        shutil.rmtree(folder / "ti16")
    client(RUN_CELLS.format(shorter=SHORTER, folder=str(folder), cells=cells), token="hf_me")
