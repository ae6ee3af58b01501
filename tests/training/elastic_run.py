"""Program of test_elastic.py: one run on changing numbers of processes, ended early in several ways.

The processes are forked from this one, which has imported everything once; they talk over gloo. Judged by a run on one
process that nothing disturbs.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from hf_vit.scripts import pretrain
from hf_vit.training import checkpoint
from hf_vit.training.preemption import PREEMPTED
from tests.processes import DIGITS, arguments, environment

# All that has state or chance in it; 24 images are 6, 3 or 2 forwards of 4
SETTINGS = {**DIGITS, "per_device_batch_size": 4, "dropout": 0.1, "drop_path": 0.1, "mixup_alpha": 0.3}
SETTINGS |= {"cutmix_alpha": 0.5, "ema_decay": 0.9, "schedule": "constant", "steps": 12, "save_every": 3}
SETTINGS |= {"eval_every": 50, "eval_split": "test[:20]", "resume": "true"}


def start(output: Path, processes: int, **changes) -> list[int]:
    """Fork the processes of a run, in a process group of their own, and return their ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: list[int] = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            os.setpgid(0, children[0] if children else 0)
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
            world |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
            os.environ |= {name: str(value) for name, value in world.items()} if processes > 1 else environment()
            workers = int(processes == 1)  # those of several processes start slowly
            run({**SETTINGS, "num_workers": workers, **changes, "output_dir": output})
        children.append(child)
    return children


def run(settings: dict):
    """Train as the script does, and end with its status."""
    status = 0
    try:
        pretrain.main(arguments(**settings))
    except SystemExit as end:
        status = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def statuses(children: list[int]) -> list[int]:
    """Wait for processes; exit statuses, or signals below zero."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def wait_for(path: Path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} does not come"
        time.sleep(0.001)


def die_while_saving(step: int):
    """Make the second process of the next run die after it has written its part of a checkpoint."""
    sha256_of = checkpoint.sha256_of

    def deadly(path):
        if f"{step:08d}.incomplete" in str(path) and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return sha256_of(path)

    checkpoint.sha256_of = deadly


def disturbed(output: Path):
    """2 processes until SIGTERM, 1 until SIGUSR1, 2 until one is killed while saving, 3 to the end."""
    saved = output / "checkpoints"
    children = start(output, 2)  # into a folder that is not there
    wait_for(saved / "step_00000003")
    os.kill(children[1], signal.SIGTERM)  # one of them: both save
    assert statuses(children) == [PREEMPTED] * 2
    at = newest(saved)
    children = start(output, 1)
    wait_for(saved / f"step_{3 * (at // 3 + 1):08d}")
    os.killpg(children[0], signal.SIGUSR1)  # its data worker too, as schedulers do
    assert statuses(children) == [PREEMPTED]
    assert newest(saved) > at
    at = newest(saved)
    sha256_of = checkpoint.sha256_of
    die_while_saving(12)
    assert statuses(start(output, 2))[1] == -signal.SIGKILL
    checkpoint.sha256_of = sha256_of
    assert at <= newest(saved) < 12
    assert statuses(start(output, 3)) == [0] * 3
    assert sorted(path.name for path in saved.iterdir())[-1] == "step_00000012"
    assert not list(saved.glob(".*"))


def newest(folder: Path) -> int:
    return max(int(path.name[5:]) for path in folder.glob("step_*"))


def compare(ours: Path, theirs: Path):
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    distance = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    print("distance", distance, flush=True)
    assert distance <= 1e-6


def main(folder: Path):
    torch.set_num_threads(1)
    for processes in (1, 2, 3):
        assert statuses(start(folder / f"on_{processes}", processes)) == [0] * processes
    compare(folder / "on_2", folder / "on_1")
    compare(folder / "on_3", folder / "on_1")
    disturbed(folder / "disturbed")
    compare(folder / "disturbed", folder / "on_1")
    print("the same weights", flush=True)
