"""What a run saves is loaded back under every setting of a launcher: its model, `best/` and its checkpoint.

Judged by the weights of a run in one process without a launcher. The environment of `accelerate launch` is made by its
own functions; test_launchers.py starts the whole launcher.
"""

import json
import socket
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

import hf_vit

from ..processes import ONE_STEP, arguments, code_of, finish, launch, start, weights
from ..tiny_models import save_tiny

TWO_STEPS = ONE_STEP | {"steps": 2, "save_every": 1, "schedule": "constant", "eval_split": "test[:20]"}
NO_TORCHRUN = dict.fromkeys(("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR"))
DYNAMO_FILE = """
distributed_type: "NO"
num_processes: 1
use_cpu: true
dynamo_config:
  dynamo_backend: EAGER
  dynamo_mode: default
  dynamo_use_dynamic: false
  dynamo_use_fullgraph: false
"""


def launched(*options: str) -> dict[str, str]:
    """Return the variables that `accelerate launch` sets for these options, as it does."""
    args = launch_command_parser().parse_args([*options, "--num_processes", "1", "script.py"])
    args, _, _ = _validate_launch_command(args)
    _, environment = prepare_simple_launcher_cmd_env(args)
    return {name: value for name, value in environment.items() if name.startswith("ACCELERATE_DYNAMO_")}


def mpi(prefix: str, local: str, tasks: str = "2") -> list[dict[str, str | None]]:
    """Return the variables of two processes that mpirun has started on one machine."""
    return [
        {**NO_TORCHRUN, f"{prefix}_SIZE": "2", f"{prefix}_RANK": rank, f"{local}RANKID": rank, f"{local}NRANKS": tasks}
        for rank in "01"
    ]


def slurm(rank: str) -> dict[str, str | None]:
    """Return the variables of a task of srun, two on one machine."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_TASKS_PER_NODE": "2"}
    return {**NO_TORCHRUN, **step}


def open_mpi(rank: str) -> dict[str, str | None]:
    """Return the variables of a process of Open MPI's mpirun, two on one machine."""
    names = {"SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}
    return {**NO_TORCHRUN, **{f"OMPI_COMM_WORLD_{name}": value for name, value in names.items()}}


# The variables of each process
SETTINGS = {
    "dynamo flag": lambda folder: [launched("--cpu", "--dynamo_backend", "eager")],
    "dynamo file": lambda folder: [launched("--config_file", str(folder / "dynamo.yaml"))],
    "dynamo variable": lambda folder: [{"ACCELERATE_DYNAMO_BACKEND": "eager"}],
    "dynamo, 2 processes": lambda folder: [{"ACCELERATE_DYNAMO_BACKEND": "eager"}] * 2,
    "MPICH": lambda folder: mpi("PMI", "MPI_LOCAL"),
    "Open MPI": lambda folder: [open_mpi(rank) for rank in "01"],
    "Slurm": lambda folder: [slurm(rank) for rank in "01"],
}
IN_A_NOTEBOOK = """
import accelerate
import hf_vit

def train():
    from hf_vit.cli.training import run_training
    run_training("pretrain", {arguments!r})

accelerate.{launcher}(train, num_processes=2{more})
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The output folder of a run without a launcher."""
    folder = tmp_path_factory.mktemp("plain") / "out"
    launch("pretrain", output_dir=folder, **TWO_STEPS)
    return folder


def assert_loads(output: Path, plain: Path):
    """The model and `best/` are those of a plain run, and the checkpoint has the tensors of one."""
    for folder in ("", "best"):
        model, _ = hf_vit.load(output / folder)
        expected, _ = hf_vit.load(plain / folder)
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=1e-5)
    state = "checkpoints/step_00000002/state.json"
    found, expected = (json.loads((folder / state).read_text()) for folder in (output, plain))
    assert set(found["tensors"]) == set(expected["tensors"])


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_a_run_saves_is_loaded(plain, tmp_path, setting):
    (tmp_path / "dynamo.yaml").write_text(DYNAMO_FILE)
    variables = SETTINGS[setting](tmp_path)
    is_compiled = "dynamo" in setting
    assert not is_compiled or variables[0]["ACCELERATE_DYNAMO_BACKEND"].lower() == "eager"
    code = code_of("pretrain", **TWO_STEPS, output_dir=tmp_path / "out")
    finish(start(code, len(variables), variables))
    assert_loads(tmp_path / "out", plain)
    assert json.loads((tmp_path / "out" / "card_data.json").read_text())["processes"] == len(variables)
    assert f"compile: {str(is_compiled).lower()}" in (tmp_path / "out" / "recipe.yaml").read_text()


@pytest.mark.parametrize("launcher", ["debug_launcher", "notebook_launcher"])
def test_what_a_notebook_saves_is_loaded(plain, tmp_path, launcher):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = arguments(**TWO_STEPS, output_dir=tmp_path / "out")
    more = f", use_port='{port}'" if launcher == "notebook_launcher" else ""
    code = IN_A_NOTEBOOK.format(arguments=line, launcher=launcher, more=more)
    finish(start(code, 1, NO_TORCHRUN))
    assert_loads(tmp_path / "out", plain)
    assert json.loads((tmp_path / "out" / "card_data.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_adapters_under_dynamo_are_merged_and_resumed(tmp_path):
    model = save_tiny(tmp_path / "tiny", image_size=(8, 8), patch_size=4)
    run = TWO_STEPS | {"model": model, "lora_rank": 2, "output_dir": tmp_path / "out"}
    del run["config"]
    dynamo = {"ACCELERATE_DYNAMO_BACKEND": "eager"}
    launch("finetune", variables=dynamo, **run)
    before = weights(tmp_path / "out")
    launch("finetune", variables=dynamo, **run | {"steps": 3}, resume="true")
    after = weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    hf_vit.load(tmp_path / "out")
    hf_vit.load(tmp_path / "out" / "best")


@pytest.mark.parametrize("processes", [1, 2])
def test_deepspeed_is_refused(tmp_path, processes):
    variables = {"ACCELERATE_USE_DEEPSPEED": "true"}
    done = launch("pretrain", processes, check=False, variables=variables, output_dir=tmp_path / "out", **ONE_STEP)
    assert done.returncode == 2
    assert done.stderr.count("DeepSpeed") == processes
    assert "Traceback" not in done.stderr
