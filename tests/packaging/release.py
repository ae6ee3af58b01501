"""What a release must pass: `make release-check`, with RELEASE=v1.2.3 for a release that has a tag.

    python -m tests.packaging.release [--tag v1.2.3] [--dist dist]

Builds the source distribution and, from it, the wheel, into dist/, twice, and compares the bytes of the wheels; checks
their metadata with twine, and the version against CHANGELOG.md and the tag; installs the wheel in a new environment
without extras, and runs the commands of commands.py there.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hf_vit import __version__

from ..paths import ROOT
from .commands import CHECKS, run_checks
from .versions import Row, copy_sources, install


def version_problems(version: str, changelog: str, tag: str | None = None) -> list[str]:
    """What does not have the version.

    Args:
        version: of the package.
        changelog: text of CHANGELOG.md, whose first heading is "## Unreleased" or "## VERSION (YYYY-MM-DD)".
        tag: of the release, such as "v1.2.3"; then the changelog needs the version and a date.
    """
    released = rf"{re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)"
    heading = rf"^## ({released}{'' if tag else '|Unreleased'})$"
    first = re.search(r"^## .*$", changelog, re.MULTILINE)
    agree = {
        "the first heading of CHANGELOG.md": first is not None and re.fullmatch(heading, first[0]),
        f"the tag {tag}": tag in (None, f"v{version}"),
    }
    return [f"{name} does not have the version {version}" for name, agrees in agree.items() if not agrees]


def build(dist: Path) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from it; return both files.

    Times in the wheel are the time of the last commit, so that everyone who builds a commit gets the same bytes.
    """
    shutil.rmtree(dist, ignore_errors=True)
    last_commit = ["git", "log", "-1", "--format=%ct"]
    seconds = subprocess.run(last_commit, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    environment = {**os.environ, "SOURCE_DATE_EPOCH": seconds}
    with tempfile.TemporaryDirectory(prefix="hf_vit_release_") as folder:
        sources = copy_sources(Path(folder) / "sources")
        command = [sys.executable, "-m", "build", "--outdir", dist.absolute(), sources]
        subprocess.run(command, env=environment, check=True)
    return next(dist.glob("*.tar.gz")), next(dist.glob("*.whl"))


def main() -> int:
    """Run every step; 1 where one found a problem."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--tag", help="of the release")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="the folder to build into; it is emptied")
    arguments = parser.parse_args()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    problems = version_problems(__version__, changelog, arguments.tag or None)
    sdist, wheel = build(arguments.dist)
    with tempfile.TemporaryDirectory(prefix="hf_vit_release_") as folder:
        _, again = build(Path(folder) / "dist")
        if again.read_bytes() != wheel.read_bytes():
            problems.append("two builds of the wheel differ")
    twine = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", sdist, wheel])
    problems += ["twine found a fault in the metadata"] if twine.returncode else []
    with tempfile.TemporaryDirectory(prefix="hf_vit_release_") as folder:
        programs = install(Row("core"), Path(folder) / "environment", wheel)
        for check, word, output in run_checks(programs, (), [check for check in CHECKS if check.extra is None]):
            print(f"{word:8}{check.command}")
            problems += [f"{check.command} failed:\n{output}"] if word == "failed" else []
    print(*problems or [f"{sdist.name} and {wheel.name} are fit for a release"], sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
