"""The wheel with each extra alone, with the lowest and the newest versions, and on other Pythons.

    make versions    # every row, an hour or two on two cores; `make versions ROWS="lowest newest"`

Each row is a new environment: the wheel, its extras, the versions of the row. In it run the commands of
commands.py from an empty folder. The lowest versions are read from pyproject.toml. The row `pip` has what
`pip install` brings, 6 GB with CUDA's libraries; there a user's first commands must print our own lines only. Needs
Linux, gcc and Python 3.11, for which the lowest versions exist; `python3.12` and `python3.13` for two rows.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..paths import ROOT
from .commands import CHECKS, Check, CheckResult, run_checks

_MORE_SOURCES = ("CHANGELOG.md", "CITATION.cff", "constraints.txt")  # of the source distribution
_NO_COMMANDS = {"dev", "benchmarks", "docs", "release", "engines", "remote", "tpu"}  # what a checkout needs
_PACKAGES = ("torch", "transformers", "numpy")  # whose versions the table shows, after Python's
_VERSIONS = f"""\
import platform
from importlib.metadata import version
print(platform.python_version(), *map(version, {_PACKAGES!r}))"""


class Row(NamedTuple):
    """An environment: a Python, extras, and which versions."""

    name: str
    extras: tuple[str, ...] = ()
    versions: str = "tested"  # those of constraints.txt; "lowest"; "newest"; "pip": with CUDA's libraries too
    python: str = sys.executable


def rows() -> list[Row]:
    extras = tuple(name for name in read_project()["optional-dependencies"] if name not in _NO_COMMANDS)
    return [
        Row("core"),
        *(Row(extra, (extra,)) for extra in extras),
        *(Row(versions, (), versions) for versions in ("lowest", "newest")),
        *(Row(f"{versions}-all", extras, versions) for versions in ("lowest", "newest")),
        *(Row(python, ("training",), "newest", python) for python in ("python3.12", "python3.13")),
        Row("pip", ("training", "analysis"), "pip"),
    ]


def read_project() -> dict:
    """The table `[project]` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def included(extras: Iterable[str]) -> set[str]:
    """The extras, and those that they name."""
    optional, found, waiting = read_project()["optional-dependencies"], set(), list(extras)
    while waiting:
        extra = waiting.pop()
        found.add(extra)
        inner = re.findall(r"hf_vit\[([\w,-]+)\]", " ".join(optional[extra]))
        waiting += [name for names in inner for name in names.split(",") if name not in found]
    return found


def lowest(extras: Iterable[str]) -> dict[str, str]:
    """The lowest version of each package that every requirement allows, such as {"torch": "2.9"}."""
    project = read_project()
    requirements = [*project["dependencies"]]
    requirements += [line for extra in included(extras) for line in project["optional-dependencies"][extra]]
    found = re.findall(r"^([\w.-]+)(?:\[.*\])?>=([\w.]+)", "\n".join(requirements), re.MULTILINE)
    return dict(sorted(found, key=lambda lower: [int(number) for number in lower[1].split(".")]))  # the last counts


def constraints(row: Row) -> list[str]:
    if row.versions == "lowest":
        return [f"{name}=={version}" for name, version in lowest(row.extras).items()]
    return (ROOT / "constraints.txt").read_text().splitlines() if row.versions == "tested" else []


def checks_of(row: Row) -> list[Check]:
    """All checks where there are no extras; else those of the extras and the few that these need."""
    if row.versions == "pip":
        first = ("hf-vit convert vit_token.npz", "hf-vit predict model", "hf-vit finetune")
        return [check for check in CHECKS if check.command.startswith(first) and check.extra in (None, "training")]
    if not row.extras:
        return list(CHECKS)
    needed = ("hf-vit env", "hf-vit convert vit_token.npz", "hf-vit predict model")
    extras = included(row.extras)
    return [check for check in CHECKS if (check.extra in extras if check.extra else check.command.startswith(needed))]


def copy_sources(folder: Path) -> Path:
    """Copy what the packages are built from, so that building leaves nothing in the checkout."""
    for name in ("hf_vit", "training"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "hf_vit_command.py",
        *_MORE_SOURCES,
    ):
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def build_wheel(folder: Path, *options: str) -> Path:
    """Build the wheel from a copy of its sources, with more options of `pip wheel`."""
    sources = copy_sources(folder / "sources")
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", *options, "--wheel-dir", folder, sources)
    return next(folder.glob("*.whl"))


def install(row: Row, environment: Path, wheel: Path) -> Path:
    """Make the environment of a row; return the folder of its programs."""
    _run(row.python, "-m", "venv", environment)
    programs = environment / "bin"
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--no-compile"]
    if uv := shutil.which("uv"):  # much quicker
        pip = [uv, "pip", "install", "--quiet", "--python", programs / "python"]
    extras = f"[{','.join(row.extras)}]" if row.extras else ""
    if row.versions == "pip":
        _run(programs / "python", "-m", "pip", "install", "--quiet", f"{wheel}{extras}")
        return programs
    lines = constraints(row)
    pinned = next((line for line in lines if line.startswith("torch==")), "torch")
    _run(*pip, "--no-deps", pinned)
    remove_cuda(programs)
    (environment / "constraints.txt").write_text("\n".join(lines) + "\n")
    _run(*pip, "--constraint", environment / "constraints.txt", f"{wheel}{extras}")
    return programs


def remove_cuda(programs: Path) -> None:
    """Make a CUDA build of torch load without CUDA's libraries, which are gigabytes; a CPU build stays as it is."""
    (metadata,) = programs.parent.glob("lib/*/site-packages/torch-*.dist-info/METADATA")
    text = metadata.read_text()
    kept = re.sub(r"^Requires-Dist: (nvidia|cuda|triton).*\n", "", text, flags=re.IGNORECASE | re.MULTILINE)
    if kept != text:
        metadata.unlink()  # it may be a link to a cache
        metadata.write_text(kept)
        _run(programs / "python", ROOT / "tests" / "packaging" / "cuda_stand_ins.py")


def run_row(row: Row, wheel: Path) -> tuple[list[str], list[CheckResult]]:
    """Install and check a row.

    Returns:
        The cells of its line of the table, and how each check ended; none where it could not be installed.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"hf_vit_{row.name}_") as folder:
        try:
            programs = install(row, Path(folder) / "environment", wheel)
            versions = _run(programs / "python", "-c", _VERSIONS).split()
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            return [row.name, "-", *["-"] * len(_PACKAGES), "not installed: " + reason.strip()[-1000:]], []
        results = run_checks(programs, included(row.extras), checks_of(row), quiet=row.versions == "pip")
    words = [result.word for result in results]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("passed", "refused", "failed") if word in words)
    return [row.name, *versions, f"{counts} ({time.monotonic() - start:.0f} s)"], results


def _run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=tempfile.gettempdir())
    done.check_returncode()
    return done.stdout


def main() -> int:
    """Print the table, a line as soon as a row has ended; 1 where a check failed."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    known = {row.name: row for row in rows()}
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(known)}; by default all")
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - known.keys():
        parser.error(f"no row {', '.join(sorted(unknown))}; there is {', '.join(known)}")
    has_failed = False
    header = ("row", "python", *_PACKAGES, "checks")
    print(f"| {' | '.join(header)} |\n| {' | '.join('---' for _ in header)} |", flush=True)
    with tempfile.TemporaryDirectory(prefix="hf_vit_wheel_") as folder:
        wheel = build_wheel(Path(folder))
        for name in arguments.rows or known:
            cells, results = run_row(known[name], wheel)
            print("|", " | ".join(cells), "|", flush=True)
            failed = [result for result in results if result.word == "failed"]
            for result in failed:
                print(f"  failed: {result.check.command}\n{result.output}", flush=True)
            has_failed |= bool(failed) or not results
    return int(has_failed)


if __name__ == "__main__":
    raise SystemExit(main())
