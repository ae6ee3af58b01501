"""What a release must pass: `make release-check`, with RELEASE=v1.2.3 for a release that has a tag.

    python -m tests.release [--tag v1.2.3] [--dist dist]

Builds the source distribution and, from it, the wheel, into dist/; checks their metadata with twine, the version
against CITATION.cff, CHANGELOG.md and the tag; installs the wheel in a new environment without extras, and runs the
commands of tests/installed.py there.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from .installed import CHECKS, run_checks
from .paths import ROOT
from .versions import Row, install, read_project

# Folders of the checkout that a source distribution leaves out, whole.
_LEFT_OUT = ("tests", "docs", "benchmarks", "model_cards", ".github", ".devcontainer", ".ci")


def version_problems(version: str, changelog: str, citation: str, tag: str | None = None) -> list[str]:
    """What is wrong with the version, a sentence each.

    Args:
        version: of pyproject.toml.
        changelog: text of CHANGELOG.md, whose first heading is "## Unreleased" or "## VERSION (YYYY-MM-DD)".
        citation: text of CITATION.cff.
        tag: of the release, such as "v1.2.3"; then the changelog needs the version and a date.
    """
    problems = []
    headings = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    dated = rf"{re.escape(version)} \(\d{{4}}-\d{{2}}-\d{{2}}\)"
    first = headings[0] if headings else "nothing"
    if tag is not None and not re.fullmatch(dated, first):
        problems.append(f"CHANGELOG.md begins with {first!r} (expected '{version} (YYYY-MM-DD)')")
    elif tag is None and first != "Unreleased" and not re.fullmatch(dated, first):
        problems.append(f"CHANGELOG.md begins with {first!r} (expected 'Unreleased' or '{version} (YYYY-MM-DD)')")
    if f"\nversion: {version}\n" not in citation:
        problems.append(f"CITATION.cff has another version than pyproject.toml ({version})")
    if tag is not None and tag != f"v{version}":
        problems.append(f"the tag is {tag} (expected v{version})")
    return problems


def build(dist: Path) -> tuple[Path, Path]:
    """Build the source distribution from a copy of the checkout, and the wheel from it; return both files."""
    shutil.rmtree(dist, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="hf_vit_release_") as folder:
        sources = Path(folder) / "sources"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (sources / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, sources / name)
        subprocess.run([sys.executable, "-m", "build", "--outdir", dist.absolute(), sources], check=True)
    return next(dist.glob("*.tar.gz")), next(dist.glob("*.whl"))


def sdist_problems(sdist: Path) -> list[str]:
    """Files of a source distribution that belong to the checkout alone."""
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    return [f"the source distribution holds {name}" for name in names if name.startswith(_LEFT_OUT)]


def main() -> int:
    """Run every step; 1 where one found a problem."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--tag", help="of the release")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="the folder to build into; it is emptied")
    arguments = parser.parse_args()
    texts = [(ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff")]
    problems = version_problems(read_project()["version"], *texts, arguments.tag or None)
    sdist, wheel = build(arguments.dist)
    problems += sdist_problems(sdist)
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
