"""Every pin to its newest release: `make update`, which then runs the checks and the tests and so says what broke.

    python -m tests.packaging.update

Compiles constraints.txt anew, with the packages of all extras that a developer installs and those that these need, and
moves each action of the workflows to the commit of its newest release. Prints each pin that changed.
"""

import difflib
import re
import subprocess
import sys
from pathlib import Path

from ..paths import ROOT

GITHUB = "https://github.com"
HEADER = """\
# The versions every change is tested with: compiled from pyproject.toml by `make update`. torch is held back there.
"""
_ACTION = re.compile(r"uses: (?P<name>[\w./-]+)@(?P<commit>[0-9a-f]{40}) # (?P<version>v[\d.]+)")


def newest_release(repository: str) -> tuple[str, str]:
    """Version and commit of the highest tag vX.Y.Z of a Git repository."""
    listing = subprocess.run(["git", "ls-remote", "--tags", repository], capture_output=True, text=True, check=True)
    releases = {}
    for line in listing.stdout.splitlines():
        commit, reference = line.split("\t")
        tag = re.fullmatch(r"refs/tags/(v\d+\.\d+\.\d+)(\^\{\})?", reference)
        if tag:
            releases[tag[1]] = commit  # of an annotated tag, the commit comes last, as vX.Y.Z^{}
    version = max(releases, key=lambda name: [int(number) for number in name[1:].split(".")])
    return version, releases[version]


def update_actions(workflow: str, server: str = GITHUB) -> str:
    """Return the text of a workflow with the newest release of each action."""

    def pin(action: re.Match[str]) -> str:
        repository = "/".join(action["name"].split("/")[:2])
        version, commit = newest_release(f"{server}/{repository}")
        return f"uses: {action['name']}@{commit} # {version}"

    return _ACTION.sub(pin, workflow)


def compile_constraints() -> str:
    """Return the text of constraints.txt with the newest versions that agree with each other."""
    command = [Path(sys.executable).with_name("uv"), "pip", "compile", "--quiet", "--upgrade", "--universal"]
    command += ["--python-version", "3.11", "--extra", "dev", "--extra", "release"]
    command += ["--no-header", "--no-annotate", "pyproject.toml"]
    return HEADER + subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout


def main() -> None:
    constraints = ROOT / "constraints.txt"
    updated = {constraints: compile_constraints()}
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        updated[path] = update_actions(path.read_text())
    for path, text in updated.items():
        lines = difflib.unified_diff(path.read_text().splitlines(), text.splitlines(), path.name, path.name, n=0)
        print(*lines, sep="\n")
        path.write_text(text)


if __name__ == "__main__":
    main()
