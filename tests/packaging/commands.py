"""Commands that the installed `hf-vit` must run in an empty folder, with and without extras.

Every command runs as a user types it, without this checkout on the path. A command whose extra is not installed may
work all the same, because another extra brings its packages; or its message names the extra to install. Needs nothing
but the standard library, because the checked environment is another one.
"""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parents[1]
_FEW_STEPS = "--epochs 1 --warmup-steps 0 --batch-size 4 --num-workers 0 --report-to none --image-size 24"
_FINETUNE = f"hf-vit finetune --recipe finetune_small --model model --dataset photographs {_FEW_STEPS}"
_OUR_LINE = re.compile(r"\s*$|hf-vit |error: |.*\d+/\d+ \w+ \[")  # of standard error: a message, or a progress bar
_PHOTOGRAPHS = TESTS.parent / "hf_vit" / "demo" / "photographs"


class Check(NamedTuple):
    """A command, a part of what it prints, the extra that it needs, and its exit status."""

    command: str
    printed: str
    extra: str | None = None
    status: int = 0


CHECKS = (
    Check("hf-vit --version", "hf-vit "),
    Check("hf-vit env", "torch"),
    Check("hf-vit recipes", "finetune_small"),
    Check("hf-vit recipes show finetune_small", "learning_rate"),
    Check("hf-vit launch-configs path cpu", "accelerate"),
    Check("hf-vit catalog B/16 --adapted-to imagenet2012", "B_16"),
    Check("hf-vit convert vit_token.npz model", "model"),
    Check("hf-vit predict model photographs/val/bees/0.jpg --format jsonl", '"label"'),
    Check("hf-vit embed model photographs --output features.npz", "features.npz"),
    Check("hf-vit search features.npz photographs/val/bees/0.jpg --model model", "bees"),
    Check("hf-vit export model back.npz --to jax", "back.npz"),
    Check("hf-vit card model --license mit", "license: mit"),
    Check("hf-vit compute model", "parameters"),
    Check("hf-vit inspect model --output report", "report", "analysis"),
    Check("hf-vit convert flax.msgpack flax", "holds an unknown architecture", "jax-checkpoints", 2),  # but is read
    Check("hf-vit convert orbax_zarr3 orbax", "holds an unknown architecture", "jax-checkpoints", 2),
    Check("hf-vit embed model photographs --output features.parquet", "features.parquet", "training"),
    Check(f"{_FINETUNE} --output-dir tuned", "tuned", "training"),
    Check(
        "hf-vit evaluate --model model --dataset photographs --split validation --num-workers 0", "accuracy", "training"
    ),
    Check(f"{_FINETUNE} --output-dir adapted --lora-rank 2", "adapted", "lora"),
    Check("hf-vit export model onnx --to onnx", "onnx", "export"),
    Check("hf-vit predict model photographs/val/bees/0.jpg --backend onnxruntime", "bees/0.jpg", "onnxruntime"),
    Check("hf-vit export model openvino --to openvino", "openvino", "openvino"),
    Check("hf-vit predict model photographs/val/bees/0.jpg --backend openvino", "bees/0.jpg", "openvino"),
    Check("hf-vit quantize model int8 --calibrate photographs --min-agreement 0", "int8", "quantization"),
)


class CheckResult(NamedTuple):
    """How a check ended: "passed", "refused" (its message names the absent extra) or "failed", with its output."""

    check: Check
    word: str
    output: str


def run_checks(
    programs: Path, extras: Collection[str], checks: Collection[Check] = CHECKS, quiet: bool = False
) -> list[CheckResult]:
    """Run checks with the programs of an environment that has some extras.

    With `quiet`, a line of another library on standard error is a failure.
    """
    with tempfile.TemporaryDirectory(prefix="hf_vit_installed_") as folder:
        containers = TESTS / "goldens_peers" / "containers"
        for file in (TESTS / "goldens" / "vit_token.npz", containers / "flax.msgpack"):
            shutil.copy(file, folder)
        shutil.copytree(containers / "orbax_zarr3", Path(folder) / "orbax_zarr3")
        for split, count in (("train", 10), ("val", 4)):
            for kind, photograph in (("ants", "china.jpg"), ("bees", "flower.jpg")):
                place = Path(folder, "photographs", split, kind)
                place.mkdir(parents=True)
                for number in range(count):
                    shutil.copyfile(_PHOTOGRAPHS / photograph, place / f"{number}.jpg")
        return [_run(check, Path(folder), programs, extras, quiet) for check in checks]


def _run(check: Check, folder: Path, programs: Path, extras: Collection[str], quiet: bool) -> CheckResult:
    name, *arguments = shlex.split(check.command)
    command, environment = [str(programs / name), *arguments], _environment(programs)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    output = done.stdout + done.stderr
    others = [line for line in re.split(r"[\r\n]", done.stderr) if not _OUR_LINE.match(line)]
    if quiet and others:
        return CheckResult(check, "failed", "\n".join(others))
    if done.returncode == check.status and check.printed in output:
        return CheckResult(check, "passed", output)
    is_refusal = done.returncode == 2 and "pip install" in output and "Traceback" not in output
    is_absent = check.extra is not None and check.extra not in extras
    return CheckResult(check, "refused" if is_refusal and is_absent else "failed", output)


def _environment(programs: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_", "VIRTUAL_ENV"))}
    return {
        **kept,
        "PATH": f"{programs}{os.pathsep}{kept.get('PATH', '')}",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
