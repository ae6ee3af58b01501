"""What GitHub's workflows run, on this machine: `make workflows`.

    python -m tests.packaging.workflows ci docs           # each job of ci.yml and docs.yml
    python -m tests.packaging.workflows nightly/versions  # one job

Each job has a new clone of the last commit, an empty home, no variables of the caller but PATH and pip's own settings
(an index that this machine can reach), and the Python that the job asks for; a Python that is not installed is named
and its job left out. Steps that use an action are GitHub's own: they are not run.
"""

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..paths import ROOT

WORKFLOWS = ROOT / ".github" / "workflows"
# What `${{ NAME }}` has here; the matrix of a job adds its own.
CONTEXT = {"github.event.release.tag_name": "", "github.run_number": "0"}


class Job(NamedTuple):
    """One run of a job: of a matrix, one for each combination."""

    name: str
    python: str | None  # such as "3.11"; of several, the last is the one that `python3` starts
    commands: list[tuple[str, dict[str, str]]]  # each step's command, and its variables
    actions: list[str]
    minutes: int | None


def substitute(value: Any, context: Mapping[str, str]) -> str:
    """Replace each `${{ NAME }}`; a name that is not in the context is an error."""
    return re.sub(r"\$\{\{\s*([\w.-]+)\s*\}\}", lambda found: context[found[1]], str(value))


def read_jobs(workflow: Path) -> Iterator[Job]:
    """Read the jobs of a workflow file."""
    content = yaml.safe_load(workflow.read_text())
    for name, job in content["jobs"].items():
        matrix = job.get("strategy", {}).get("matrix", {})
        rows = [{f"matrix.{key}": value} for key, values in matrix.items() for value in values] or [{}]
        for row in rows:
            context = {**CONTEXT, **row}
            python = None
            commands = []
            actions = []
            for step in job["steps"]:
                if "uses" in step:
                    actions.append(step["uses"])
                    python = step.get("with", {}).get("python-version", python)
                else:
                    variables = {**content.get("env", {}), **job.get("env", {}), **step.get("env", {})}
                    values = {key: substitute(value, context) for key, value in variables.items()}
                    commands.append((substitute(step["run"], context), values))
            if python is not None:
                python = substitute(python, context).split()[-1]
            label = "/".join([workflow.stem, name, *row.values()])
            yield Job(label, python, commands, actions, job.get("timeout-minutes"))


def run_job(job: Job, folder: Path) -> str:
    """Run the commands of a job in a clone inside an empty folder; return how it ended."""
    clone, home, programs = (folder / name for name in ("clone", "home", "programs"))
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
    home.mkdir()
    programs.mkdir()
    if job.python is not None:
        python = shutil.which(f"python{job.python}")
        if python is None:
            return f"left out: there is no python{job.python} here"
        for name in ("python", "python3"):
            (programs / name).symlink_to(Path(python).resolve())
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_"))}
    for command, variables in job.commands:
        environment = {**variables, **kept, "HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", "CI": "true"}
        done = subprocess.run(["bash", "-e", "-c", command], cwd=clone, env=environment)
        if done.returncode:
            return f"failed: {command} (exit status {done.returncode})"
    return "passed"


def main() -> int:
    """Run the chosen jobs one after the other; 1 where one failed."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("names", nargs="*", metavar="WORKFLOW[/JOB]", help="by default all")
    arguments = parser.parse_args()
    jobs = [job for path in sorted(WORKFLOWS.glob("*.yml")) for job in read_jobs(path)]
    for name in arguments.names:
        if not any(f"{job.name}/".startswith(f"{name}/") for job in jobs):
            parser.error(f"no job {name}; there are {', '.join(job.name for job in jobs)}")
    lines = []
    for job in jobs:
        if arguments.names and not any(f"{job.name}/".startswith(f"{name}/") for name in arguments.names):
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="hf_vit_workflow_") as folder:
            end = run_job(job, Path(folder))
        minutes = (time.monotonic() - start) / 60
        lines.append(f"{job.name}: {end} ({minutes:.1f} of {job.minutes} minutes)")
        print(lines[-1], flush=True)
    print(*lines, sep="\n")
    return int(any(": failed" in line for line in lines))


if __name__ == "__main__":
    raise SystemExit(main())
