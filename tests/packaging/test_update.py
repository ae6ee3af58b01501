"""`make update`: actions go to the commit of their newest release, also where the tag is an object of its own."""

import subprocess

import pytest

from .update import update_actions

OLD = "0" * 40


@pytest.fixture
def server(tmp_path):
    """A folder with the repository owner/action: releases v1.9.0 and v1.10.0 (annotated), and a moving tag v1."""

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main"]
        command = ["git", "-C", str(tmp_path / "owner" / "action"), *identity, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "owner" / "action").mkdir(parents=True)
    git("init", "--quiet")
    commits = []
    for words in (["tag", "v1.9.0"], ["tag", "--annotate", "v1.10.0", "--message", "new"], ["tag", "v1"]):
        git("commit", "--quiet", "--allow-empty", "--message", "step")
        git(*words)
        commits.append(git("rev-parse", "HEAD"))
    return tmp_path, commits


def test_an_action_goes_to_the_commit_of_its_newest_release(server):
    folder, commits = server
    line = "- uses: owner/action/inner@{} # {}\n  run: make test\n"
    assert update_actions(line.format(OLD, "v1.2.3"), str(folder)) == line.format(commits[1], "v1.10.0")
