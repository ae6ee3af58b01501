"""GitHub's workflows: what they run exists, ends in time, and uses actions whose code cannot change."""

import re
import shlex
import subprocess

import pytest
import yaml

from ..paths import ROOT
from .workflows import WORKFLOWS, Job, read_jobs, run_job, substitute

JOBS = [job for path in sorted(WORKFLOWS.glob("*.yml")) for job in read_jobs(path)]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_runs_targets_of_the_makefile_and_pinned_actions(job):
    for command, _ in job.commands:
        for part in command.split("&&"):
            program, *words = shlex.split(part)
            if program == "make":
                subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True)
            else:
                assert program == ".venv/bin/python"  # which `make .venv/installed` made
    for action in job.actions:
        assert re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40}", action)
    assert job.minutes


def test_a_pull_request_has_a_quarter_of_an_hour_on_one_python():
    jobs = [job for job in JOBS if job.name.startswith("ci/")]
    assert max(job.minutes for job in jobs) <= 15
    assert {job.python for job in jobs} == {"3.11"}


def test_a_matrix_and_variables_are_resolved(tmp_path):
    job = {
        "strategy": {"matrix": {"python": ["3.11", "3.12"]}},
        "steps": [
            {"uses": "a/setup", "with": {"python-version": "${{ matrix.python }}"}},
            {"run": "make x", "env": {"TAG": "${{ github.event.release.tag_name }}"}},
        ],
    }
    path = tmp_path / "night.yml"
    path.write_text(yaml.safe_dump({"env": {"A": "1"}, "jobs": {"test": job}}))
    commands = [("make x", {"A": "1", "TAG": ""})]
    expected = [Job(f"night/test/{python}", python, commands, ["a/setup"], None) for python in ("3.11", "3.12")]
    assert list(read_jobs(path)) == expected
    with pytest.raises(KeyError, match="secret"):
        substitute("${{ secret }}", {})


@pytest.mark.parametrize(
    ("command", "end"), [('test -d hf_vit && test -z "$(ls $HOME)"', "passed"), ("false", "failed")]
)
def test_a_job_runs_in_a_clone_with_an_empty_home(tmp_path, command, end):
    assert run_job(Job("a", None, [(command, {})], [], 1), tmp_path).startswith(end)


def test_a_python_that_is_not_here_is_named(tmp_path):
    assert "python2.99" in run_job(Job("a", "2.99", [("false", {})], [], 1), tmp_path)
