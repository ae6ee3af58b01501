"""What maintainers run: `make versions` and `make release-check`; and links of pages outside the site."""

import re

import pytest

from ..paths import ROOT
from .release import version_problems


@pytest.mark.parametrize(
    ("changelog", "tag", "problems"),
    [
        ("## Unreleased\n## 1.2.2 (2026-01-02)", None, 0),
        ("## 1.2.3 (2026-01-02)", "v1.2.3", 0),
        ("## Unreleased\n", "v1.2.3", 1),
        ("## 1.2.3 (soon)", None, 1),
        ("## 1.2.3 (2026-01-02)", "v1.2.4", 1),
    ],
)
def test_the_version_of_a_release_is_the_same_everywhere(changelog, tag, problems):
    assert len(version_problems("1.2.3", changelog, tag)) == problems


@pytest.mark.parametrize("page", [*(path.name for path in sorted(ROOT.glob("*.md"))), "model_cards/README.md"])
def test_links_of_pages_outside_the_site(page):
    """Links inside the site are checked when it is built."""
    text = (ROOT / page).read_text()
    for name, anchor in re.findall(r"\]\((?!http)([^)#]+)#?([^)]*)\)", text):
        headings = re.findall(r"^#+ (.+)$", (ROOT / name).read_text("utf-8", "replace"), re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}
