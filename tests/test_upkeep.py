"""What maintainers run: workflows, forms, containers, `make versions` and `make release-check`."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from .installed import CHECKS, Check, judge, lines_of_others
from .paths import ROOT
from .release import version_problems
from .versions import Row, checks_of, constraints, included, lowest, read_project, requirements, rows

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
CITATION = "title: hf_vit\nversion: 1.2.3\n"


def jobs_of(path: Path) -> dict:
    return yaml.safe_load(path.read_text())["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_reads_the_repository_and_runs_targets_of_make(path):
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}
    for job in jobs_of(path).values():
        assert job["timeout-minutes"] <= 180
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", step["uses"])
            else:
                target = re.fullmatch(r"make ([a-z-]+)", step["run"])[1]  # what varies is in `env`: no shell reads it
                done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr


def test_workflows_may_write_no_more_than_they_need():
    allowed = {
        ("docs", "publish"): {"pages": "write", "id-token": "write"},
        ("release", "publish"): {"id-token": "write", "attestations": "write"},
    }
    found = {
        (path.stem, name): job["permissions"]
        for path in WORKFLOWS
        for name, job in jobs_of(path).items()
        if "permissions" in job
    }
    assert found == allowed


def test_workflows_test_the_pythons_and_the_rows_that_there_are():
    jobs = jobs_of(ROOT / ".github" / "workflows" / "ci.yml")
    versions = [line.rpartition(" ")[2] for line in read_project()["classifiers"] if ":: 3." in line]
    assert jobs["test"]["strategy"]["matrix"]["python"] == versions
    assert set(jobs["versions"]["strategy"]["matrix"]["row"]) < {row.name for row in rows()}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_wants(path):
    """Keys and types: GitHub's "Syntax for GitHub's form schema"."""
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    for field in form["body"]:
        assert field["type"] in ("textarea", "input")
        assert "label" in field["attributes"]
    has_environment = any("hf-vit env" in field["attributes"]["label"] for field in form["body"])
    assert has_environment == (path.stem != "wish")


def test_the_containers_name_files_targets_and_extras_that_there_are():
    dockerfile = (ROOT / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists()
            assert f"!{name}\n" in (ROOT / ".dockerignore").read_text()
    extras = re.search('EXTRAS="(.*)"', dockerfile)[1].split(",")
    assert set(extras) <= read_project()["optional-dependencies"].keys()
    command = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())["postCreateCommand"]
    assert subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True).returncode == 0


def test_the_lowest_versions_are_those_of_pyproject():
    assert lowest(())["torch"] == "2.6"
    assert lowest(("lora",))["torch"] == "2.9"  # the extra training, which lora names
    assert included(("demo",)) == {"demo", "training", "analysis"}
    every = lowest(tuple(read_project()["optional-dependencies"]))
    text = (ROOT / "pyproject.toml").read_text()
    for name, version in every.items():
        assert f'"{name}>={version}' in text
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements(("training", "demo"))}
    assert {"torch", "gradio", "datasets"} <= names
    assert "torch==2.6" in constraints(Row("lowest", (), "lowest"))
    assert constraints(Row("newest", (), "newest")) == []


def test_every_extra_of_commands_has_a_row_and_a_check():
    alone = {row.name: row for row in rows() if row.extras == (row.name,)}
    assert {check.extra for check in CHECKS} - {None} == alone.keys() - {"demo"}  # which serves a page
    assert {check.extra for check in checks_of(alone["lora"])} == {None, "training", "lora"}
    assert checks_of(Row("core")) == list(CHECKS)


@pytest.mark.parametrize(
    ("status", "output", "extras", "word"),
    [
        (0, "written to report", (), "passed"),
        (0, "nothing", ("analysis",), "failed"),
        (2, "matplotlib is not installed: pip install 'hf_vit[analysis]'", (), "refused"),
        (2, "matplotlib is not installed: pip install 'hf_vit[analysis]'", ("analysis",), "failed"),
        (1, "Traceback ... pip install", (), "failed"),
    ],
)
def test_a_check_passes_is_refused_or_fails(status, output, extras, word):
    assert judge(Check("hf-vit inspect model", "report", "analysis"), status, output, extras) == word


def test_lines_of_other_libraries_are_seen():
    ours = "hf-vit predict: a.png is not an image\n| | 0/7 steps [0:00<?]\raccuracy 50% |█| 7/7 steps [00:09<00:00]\n"
    assert lines_of_others(ours) == []
    others = ["nanobind: leaked 4 instances!", "modeling_utils.py:3303: FutureWarning: `x` is deprecated"]
    assert lines_of_others(ours + "\n".join(others)) == others


@pytest.mark.parametrize(
    ("changelog", "citation", "tag", "problem"),
    [
        ("## Unreleased\n## 1.2.2 (2026-01-02)", CITATION, None, None),
        ("## 1.2.3 (2026-01-02)", CITATION, "v1.2.3", None),
        (
            "## Unreleased\n",
            CITATION,
            "v1.2.3",
            "CHANGELOG.md begins with 'Unreleased' (expected '1.2.3 (YYYY-MM-DD)')",
        ),
        ("## 1.2.3 (soon)", CITATION, None, "CHANGELOG.md begins with '1.2.3 (soon)' (expected 'Unreleased' or"),
        ("## 1.2.3 (2026-01-02)", CITATION, "v1.2.4", "the tag is v1.2.4 (expected v1.2.3)"),
        ("## Unreleased", "version: 1.2.2\n", None, "CITATION.cff has another version than pyproject.toml (1.2.3)"),
    ],
)
def test_the_version_of_a_release_stands_everywhere(changelog, citation, tag, problem):
    problems = version_problems("1.2.3", changelog, citation, tag)
    assert problems == [] if problem is None else problems[0].startswith(problem)


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "SECURITY.md", "RELEASING.md", "CODE_OF_CONDUCT.md", "model_cards/README.md"],
)
def test_pages_outside_the_site_link_files_that_there_are_and_name_no_address_of_mail(page):
    text = (ROOT / page).read_text()
    for name, anchor in re.findall(r"\]\((?!http)([^)#]+)#?([^)]*)\)", text):
        headings = re.findall(r"^#+ (.+)$", (ROOT / name).read_text("utf-8", "replace"), re.MULTILINE)
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}
    assert "@" not in text
