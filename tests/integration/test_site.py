"""The documentation site, built strictly: no dead link, nothing loaded from elsewhere, tables that sort."""

import os
import re
import subprocess
import sys

import pytest

from ..paths import BROWSER, ROOT

# The cells of the column with this name, from top to bottom.
CELLS = """name => {
    const heads = [...document.querySelectorAll("article th")];
    const head = heads.find((cell) => cell.textContent.startsWith(name));
    return [...head.closest("table").tBodies[0].rows].map((row) => row.cells[head.cellIndex].textContent.trim());
}"""


@pytest.mark.slow
@pytest.mark.browser
def test_the_site_has_no_dead_link_and_loads_nothing_from_elsewhere(tmp_path):
    """One test, because the build takes long; tables need a browser."""
    pytest.importorskip("mkdocstrings_handlers.python", reason="the extra docs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text = "".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert re.findall(r"<(?:script|img|iframe)[^>]*src=\"?(?:https?:)?//[^>]*>", text) == []
    assert re.findall(r"<link[^>]*rel=\"?stylesheet[^>]*href=\"?(?:https?:)?//[^>]*>", text) == []
    check_llms_txt(tmp_path)
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no browser is installed to try the tables; the rest passed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        check_tables(chromium.new_page(viewport={"width": 390, "height": 844}), tmp_path / "benchmarks")


def check_llms_txt(folder):
    """Each link leads to the Markdown of a page, with its tables filled in, and each page of the menu has a link."""
    links = re.findall(r"^- \[.+\]\((.+)\)$", (folder / "llms.txt").read_text(), re.MULTILINE)
    menu = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("theme:")[0])
    assert set(links) == set(menu)
    for link in links:
        text = (folder / link).read_text()
        assert text.lstrip().startswith("#"), link
        assert "<!-- table" not in text, link


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
