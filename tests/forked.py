"""Processes that start at once: one process imports torch, transformers and hf_vit, and forks for each of them."""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

LIMIT = 300  # seconds: a process that hangs is a failure, not an endless test


class ForkServer:
    """Starts processes that have imported everything.

    Args:
        folder: each process has a folder in it, with what it prints.
        environment: variables of the server, for what libraries read when they are imported.
        has_hf_vit: flag: hf_vit is imported too, not only torch and transformers.
    """

    def __init__(self, folder: Path, environment: dict[str, str], has_hf_vit: bool = True):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.count = folder, 0
        self.environment = {**environment, "PYTHONPATH": str(Path(__file__).parents[1])}
        line = [sys.executable, "-c", f"from tests.forked import serve\nserve({has_hf_vit})"]
        self.process = subprocess.Popen(
            line, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, code: str, variables: dict[str, str] | None = None, cwd: Path | None = None) -> "Forked":
        """Run Python code in a new process, in a session of its own."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        request = {"code": code, "folder": str(folder), "cwd": str(cwd or Path.cwd())}
        request["environment"] = self.environment if variables is None else variables
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Forked(folder, int(self.process.stdout.readline()))

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()


class Forked:
    """A process of a ForkServer."""

    def __init__(self, folder: Path, pid: int):
        self.folder, self.pid, self.status = folder, pid, -1

    def is_running(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    def kill(self) -> None:
        """Send SIGKILL to it and to what it started, and wait for its end."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        while self.is_running():
            time.sleep(0.01)

    def wait(self) -> tuple[str, str]:
        """Its standard output and standard error, when it has ended by itself."""
        status, deadline = self.folder / "status", time.monotonic() + LIMIT
        while not status.exists():
            assert self.is_running() or status.exists(), "the process was killed"
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the process has not ended after {LIMIT} seconds")
            time.sleep(0.01)
        self.status = int(status.read_text())
        return (self.folder / "output").read_text(), (self.folder / "error").read_text()


def serve(has_hf_vit: bool) -> None:
    from transformers import pipeline  # noqa: F401

    if has_hf_vit:
        import sklearn.datasets  # noqa: F401

        import hf_vit.hub.cards  # noqa: F401
        import hf_vit.models.modeling_hf_vit  # noqa: F401
        import hf_vit.training.api  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(**json.loads(line))
        print(pid, flush=True)


def run(code: str, folder: str, cwd: str, environment: dict[str, str]) -> None:
    """What a forked process does: run the code, leave its exit status behind, and end."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in ((1, "output"), (2, "error")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), stream)
    status: object = 0
    try:
        exec(compile(code, "forked", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    Path(folder, "status.new").write_text(str(status))
    os.rename(os.path.join(folder, "status.new"), os.path.join(folder, "status"))
    os._exit(0)
