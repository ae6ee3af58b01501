"""The code of docs/frameworks.md runs in each framework."""

import re
import shutil
from importlib.util import find_spec

import pytest

from ..paths import ROOT

SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
PACKAGES = {  # section of the page -> the package that it needs
    "Lightning": "pytorch_lightning",
    "fastai": "fastai",
    "skorch": "skorch",
    "captum": "captum",
    "grad-cam": "pytorch_grad_cam",
    "lightly": "lightly",
    "cleanlab": "cleanlab",
}


def test_every_section_is_tried():
    assert {title for title, text in SECTION.findall(PAGE) if BLOCK.search(text)} == PACKAGES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("framework", PACKAGES)
def test_a_framework_takes_the_model(framework, doc_fixtures, client, tmp_path):
    package = PACKAGES[framework]
    if not find_spec(package):
        pytest.skip(f"{package} is not installed")
    folder = tmp_path / "folder"
    shutil.copytree(doc_fixtures / "folder", folder)
    shared, own = BLOCK.findall(PAGE)[0], BLOCK.findall(dict(SECTION.findall(PAGE))[framework])[0]
    client(f"import os\nos.chdir({str(folder)!r})\n{shared}\n{own}")
