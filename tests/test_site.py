"""The documentation site, built strictly: no dead link, every public name in the reference, nothing from elsewhere."""

import os
import re
import subprocess
import sys

import pytest

from .paths import ROOT
from .test_pages import PUBLIC


@pytest.mark.slow
def test_the_site_has_every_public_name_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocstrings_handlers.python", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = "".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert [name for name in PUBLIC if f'id="{name}"' not in text] == []
    assert re.findall(r"<(?:script|img|iframe)[^>]*src=\"?(?:https?:)?//[^>]*>", text) == []
    assert re.findall(r"<link[^>]*rel=\"?stylesheet[^>]*href=\"?(?:https?:)?//[^>]*>", text) == []
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
