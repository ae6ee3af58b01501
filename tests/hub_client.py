"""Users of the Hub of local_hub.py, each in a process of its own.

huggingface_hub reads the address of the Hub when it is imported, so it cannot be this process. Importing torch and
transformers takes seconds: one process does so, and forks for every user.
"""

import json
import os
import subprocess
import sys
import textwrap
import time
import traceback
from pathlib import Path

from .local_hub import Repo

LIMIT = 300  # seconds: a client that hangs is a failure, not an endless test


class Clients:
    """Starts processes that talk to a Hub.

    Args:
        hub: a running LocalHub.
        folder: where their caches and outputs go.
    """

    def __init__(self, hub, folder: Path):
        self.folder, self.count = folder, 0
        environment = {
            **os.environ,
            **hub.env(None, folder / "home"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "CI": "true",  # otherwise OpenVINO's convert_model reports to its makers
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        folder.mkdir(parents=True)
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.hub_client"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, command: str | list, token: str | None = "hf_alice") -> "Client":
        """Run Python code, or `hf-vit` with the arguments of a list."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        code = textwrap.dedent(command) if isinstance(command, str) else [str(argument) for argument in command]
        request = {"command": code, "token": token or "", "folder": str(folder)}
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return Client(folder, int(self.server.stdout.readline()))

    def __call__(self, command: str | list, token: str | None = "hf_alice", status: int = 0) -> str:
        """Run it to its end; what it printed, on standard error where it is to fail."""
        client = self.start(command, token)
        output, error = client.wait()
        assert client.status == status, output + error
        return (error if status else output).strip()

    def stop(self) -> None:
        self.server.stdin.close()
        self.server.wait()
        self.server.stdout.close()


class Client:
    def __init__(self, folder: Path, pid: int):
        self.folder, self.pid, self.status = folder, pid, None

    def is_running(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def wait(self) -> tuple[str, str]:
        """Its standard output and standard error, when it has ended by itself."""
        status, deadline = self.folder / "status", time.monotonic() + LIMIT
        while not status.exists():
            assert self.is_running() or status.exists(), "the client was killed"
            assert time.monotonic() < deadline, f"the client has not ended after {LIMIT} seconds"
            time.sleep(0.02)
        self.status = int(status.read_text())
        return (self.folder / "output").read_text(), (self.folder / "error").read_text()


def commits_of(hub, repository: str, revision: str = "main") -> list[dict]:
    """Of a model, newest first."""
    repo = Repo(hub, "model", repository)
    return list(repo.history(repo.resolve(revision)))


def read_file(hub, repository: str, name: str, revision: str = "main") -> bytes:
    """Of a model."""
    return Repo(hub, "model", repository).read(commits_of(hub, repository, revision)[0]["files"][name])


def readme_of(hub, repository: str, revision: str = "main") -> str:
    """Of a model."""
    return read_file(hub, repository, "README.md", revision).decode()


def serve() -> None:
    import signal

    from transformers import pipeline  # noqa: F401

    import hf_vit.hub.cards
    import hf_vit.models.modeling_hf_vit  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(**json.loads(line))
        print(pid, flush=True)


def run(command: str | list[str], token: str, folder: str) -> None:
    """What a forked process does: run the command in a fresh cache, leave the status behind, and end."""
    from huggingface_hub import constants

    os.environ["HF_TOKEN"] = token
    constants.HF_HUB_CACHE = os.path.join(folder, "cache")
    for stream, name in ((1, "output"), (2, "error")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), stream)
    status = 0
    try:
        if isinstance(command, str):
            exec(compile(command, "client", "exec"), {"__name__": "__main__"})
        else:
            from hf_vit.cli import main

            status = main(command)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    Path(folder, "status.new").write_text(str(status))
    os.rename(os.path.join(folder, "status.new"), os.path.join(folder, "status"))
    os._exit(0)


if __name__ == "__main__":
    serve()
