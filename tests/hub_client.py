"""Users of the Hub of local_hub.py, each in a process of its own.

huggingface_hub reads the address of the Hub when it is imported, so it cannot be this process.
"""

import os
import textwrap
from pathlib import Path

from .forked import Forked, ForkServer
from .local_hub import Repo

AS_USER = """
import os
from huggingface_hub import constants
os.environ["HF_TOKEN"] = {token!r}
constants.HF_HUB_CACHE = {cache!r}
"""


class Clients(ForkServer):
    """Starts processes that talk to a Hub.

    Args:
        hub: a running LocalHub.
        folder: where their caches and outputs go.
    """

    def __init__(self, hub, folder: Path):
        super().__init__(
            folder,
            {
                **os.environ,
                **hub.env(None, folder / "home"),
                "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "CI": "true",  # otherwise OpenVINO's convert_model reports to its makers
            },
        )

    def begin(self, command: str | list, token: str | None = "hf_alice") -> Forked:
        """Start Python code, or `hf-vit` with the arguments of a list, with a fresh cache."""
        if isinstance(command, list):
            code = f"from hf_vit.cli import main\nraise SystemExit(main({list(map(str, command))!r}))"
        else:
            code = textwrap.dedent(command)
        cache = str(self.folder / f"cache{self.count}")
        return self.start(AS_USER.format(token=token or "", cache=cache) + code)

    def __call__(self, command: str | list, token: str | None = "hf_alice", status: int = 0) -> str:
        """Run it to its end; what it printed, on standard error where it is to fail."""
        client = self.begin(command, token)
        output, error = client.wait()
        assert client.status == status, output + error
        return (error if status else output).strip()


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
