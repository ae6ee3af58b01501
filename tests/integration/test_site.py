"""The documentation site, built strictly: no dead link, every public name in the reference, nothing from elsewhere."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from threading import Thread

import pytest
import yaml

from ..paths import ROOT

PUBLIC = {
    f"{module}.{name}": getattr(import_module(module), name)
    for module in ("hf_vit", "hf_vit.analysis", "hf_vit.catalog", "hf_vit.conversion")
    for name in import_module(module).__all__
    if callable(getattr(import_module(module), name))
}

# The cells of the column with this name, from top to bottom.
CELLS = """name => {
    const heads = [...document.querySelectorAll("article th")];
    const head = heads.find((cell) => cell.textContent.startsWith(name));
    return [...head.closest("table").tBodies[0].rows].map((row) => row.cells[head.cellIndex].textContent.trim());
}"""


@pytest.mark.slow
@pytest.mark.browser
def test_the_site_has_every_public_name_fetches_nothing_and_sorts_its_tables(tmp_path):
    """One test, because the site is built for it; the tables need a browser."""
    pytest.importorskip("mkdocstrings_handlers.python", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = "".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert [name for name in PUBLIC if f'id="{name}"' not in text] == []
    assert re.findall(r"<(?:script|img|iframe)[^>]*src=\"?(?:https?:)?//[^>]*>", text) == []
    assert re.findall(r"<link[^>]*rel=\"?stylesheet[^>]*href=\"?(?:https?:)?//[^>]*>", text) == []
    check_llms_txt(tmp_path)
    playwright = pytest.importorskip("playwright.sync_api")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no browser is installed to try the tables; the rest passed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        check_tables(chromium.new_page(viewport={"width": 390, "height": 844}), tmp_path / "benchmarks")
        check_search(chromium.new_page(viewport={"width": 1300, "height": 900}), tmp_path)


def check_llms_txt(folder):
    """Each link leads to the Markdown of a page, with its tables filled in, and each page of the menu has a link."""
    links = re.findall(r"^- \[.+\]\((.+)\)$", (folder / "llms.txt").read_text(), re.MULTILINE)
    menu = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("theme:")[0])
    assert set(links) == set(menu)
    for link in links:
        text = (folder / link).read_text()
        assert text.lstrip().startswith("#"), link
        assert "<!-- table" not in text, link


def test_the_skill_is_made_from_the_pages_and_its_links_exist():
    """`python docs/skill.py` makes it anew; tests/integration/test_pages.py runs its commands."""
    specification = importlib.util.spec_from_file_location("skill", ROOT / "docs" / "skill.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    text = module.SKILL.read_text(encoding="utf-8")
    assert text == module.skill()
    assert yaml.safe_load(text.split("---")[1])["name"] == module.SKILL.parent.name
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert len(links) > 20
    assert [link for link in links if not (module.SKILL.parent / link.partition("#")[0]).exists()] == []


def check_tables(page, folder):
    """A click sorts numbers by size, also those with a comma, with empty cells last; a phone shows the page."""
    for name, column in (("models", "ImageNet top-1"), ("models", "multiply-adds"), ("measuring", "all")):
        page.goto((folder / f"{name}.html").as_uri())
        for sign in (1, -1):  # the largest first, then the other way round
            page.locator("article th", has_text=re.compile(f"^{column}")).first.click()
            cells = page.evaluate(CELLS, column)
            numbers = [float(cell.replace(",", "")) for cell in cells if cell]
            assert len(numbers) > 3
            assert numbers == sorted(numbers, key=lambda number: -sign * number)
            assert not any(cells[len(numbers) :])
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def check_search(page, folder):
    """An option is found as it is typed, at the place that explains it."""
    handler = partial(QuietHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
        for query, anchor in (
            ("--image-size", "-image-size"),
            ("warmup_steps", "#warmup-steps"),
            ("--top-k", "-top-k"),
        ):
            page.fill(".md-search__input", "")
            page.type(".md-search__input", query)
            expected = f".md-search-result__item:first-child .md-search-result__link[href*='{anchor}']"
            page.wait_for_selector(expected, state="attached", timeout=30_000)
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_):
        pass
