"""Processes for tests: forked from one that has imported everything, or started through a launch template.

A new Python needs six seconds for its imports, a forked one none. This module imports neither torch nor hf_vit, so that
the server of the forks decides what they have imported.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from subprocess import PIPE

from .paths import ROOT

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
        self.environment = {**environment, "PYTHONPATH": str(ROOT)}
        line = [sys.executable, "-c", f"from tests.processes import serve\nserve({has_hf_vit})"]
        self.process = subprocess.Popen(line, env=self.environment, stdin=PIPE, stdout=PIPE, text=True)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.answers = self.process.stdin, self.process.stdout

    def start(self, code: str, variables: dict[str, str] | None = None, cwd: Path | None = None) -> "Forked":
        """Run Python code in a new process, in a session of its own."""
        self.count += 1
        folder = self.folder / str(self.count)
        folder.mkdir()
        request = {"code": code, "folder": str(folder), "cwd": str(cwd or Path.cwd())}
        request["environment"] = self.environment if variables is None else variables
        print(json.dumps(request), file=self.requests, flush=True)
        return Forked(folder, int(self.answers.readline()))

    def stop(self) -> None:
        self.requests.close()
        self.process.terminate()
        self.process.wait()
        self.answers.close()


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
        import matplotlib.figure  # noqa: F401
        from matplotlib.backend_bases import FigureCanvasBase

        import hf_vit.hub.cards  # noqa: F401
        import hf_vit.inference.metrics  # noqa: F401
        import hf_vit.models.modeling_hf_vit  # noqa: F401
        import hf_vit.training.api  # noqa: F401
        from hf_vit.data.sources import load_digits

        from .blank_figures import print_blank_figure

        load_digits()
        FigureCanvasBase.print_figure = print_blank_figure

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(**json.loads(line))
        print(pid, flush=True)


def reap(*_) -> None:
    """Wait for the processes that have ended, so that their time counts as this server's."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


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


def memory(name: str) -> int:
    """Bytes of this process that Linux counts under a name, such as VmRSS (proc_pid_status(5))."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


def growth_of(action) -> int:
    """Bytes by which the memory of this process has grown at most while something ran."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = memory("VmRSS")
    action()
    return memory("VmHWM") - before


# Runs of the training scripts

MODEL = {"hidden_size": 14, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 22}
MODEL |= {"image_size": 8, "patch_size": 4}
# 1,437 digits are 60 steps of 24 an epoch; 70 steps end in the second one
DIGITS = {"dataset": "digits", "eval_split": "test[:103]", "config": json.dumps(MODEL), "report_to": "none"}
DIGITS |= {"batch_size": 24, "per_device_batch_size": 6, "crop_area": "0.6,1", "flip": "false", "learning_rate": 0.05}
DIGITS |= {"warmup_steps": 5, "steps": 70, "log_every": 1, "eval_every": 25, "save_every": 9, "eval_batch_size": 32}
DIGITS |= {"num_workers": 1}
ONE_STEP = {**DIGITS, "steps": 1, "warmup_steps": 0, "num_workers": 0}


def arguments(**settings) -> list[str]:
    """Of a command line: names and values."""
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def command(script: str, **settings) -> list[str]:
    """The command line of a script, in one process."""
    return [sys.executable, str(ROOT / "training" / f"{script}.py"), *arguments(**settings)]


def through(template: str, processes: int, runs: Path, *options: str) -> list[str]:
    """The command line that runs launched_runs.py with a file through a launch template, on CPUs in float32."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    launcher += ["--config_file", str(ROOT / "training" / "accelerate" / f"{template}.yaml"), "--mixed_precision", "no"]
    return [*launcher, *options, str(ROOT / "tests" / "training" / "launched_runs.py"), str(runs)]


def environment() -> dict[str, str]:
    offline = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **offline, "TOKENIZERS_PARALLELISM": "0", "PYTHONPATH": str(ROOT)}


@cache
def server() -> ForkServer:
    """Return the process that training runs are forked from."""
    return ForkServer(Path(tempfile.mkdtemp(prefix="hf_vit_runs_")), environment())


def stop_server() -> None:
    """End the process that `server` started, if it did."""
    if server.cache_info().currsize:
        server().stop()
        shutil.rmtree(server().folder)


def start(
    code: str, processes: int = 1, variables: dict[str, str | None] | list[dict[str, str | None]] | None = None
) -> list[Forked]:
    """Run Python code in processes that talk over gloo, as launchers start them.

    Args:
        variables: changes of their environment, or of that of each, where None takes one out.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    running = []
    for rank in range(processes):
        rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), **world} if processes > 1 else {}
        own = variables[rank] if isinstance(variables, list) else variables or {}
        changed = {**environment(), **rank_variables, **own}
        running.append(server().start(code, {name: value for name, value in changed.items() if value is not None}))
    return running


def finish(running: list[Forked], check: bool = True) -> subprocess.CompletedProcess:
    """Wait for processes; return what they print, that of the main process first, and the largest exit status."""
    printed = [process.wait() for process in running]
    output, errors = ("".join(texts) for texts in zip(*printed, strict=True))
    status = max(process.status for process in running)
    assert not (check and status), f"exit status {status}:\n{output[-2000:]}\n{errors[-4000:]}"
    return subprocess.CompletedProcess([], status, output, errors)


def code_of(script: str, processes: int = 1, **settings) -> str:
    """Python code that runs a training script; several processes have no data workers, which start slowly."""
    settings |= {"num_workers": 0} if processes > 1 else {}
    words = [script, *arguments(**settings)]
    return f"from hf_vit.cli import main\nif status := main({words!r}):\n    raise SystemExit(status)"


def launch(
    script: str, processes: int = 1, check: bool = True, variables: dict[str, str | None] | None = None, **settings
) -> subprocess.CompletedProcess:
    """Run a script to its end."""
    return finish(start(code_of(script, processes, **settings), processes, variables), check)


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def history(folder: Path) -> list[dict]:
    """What the newest checkpoint says of the steps so far."""
    newest = max((folder / "checkpoints").glob("step_*"))
    return json.loads((newest / "state.json").read_text())["history"]
