"""Five optimiser steps with every launch template, on CPU processes over gloo, compared with one process.

    python benchmarks/launchers.py --write

Prints the difference of the final weights of each launcher, precision and feature from those of one process; --write
puts the table into docs/hardware.md. Results in benchmarks/results/launchers.json are not measured again, except with
--again. A full run takes about ten minutes on two cores. `accelerate launch` also starts this file, in each process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from common import HERE, table, update_section
from safetensors.torch import load_file

ROOT = HERE.parent
RESULTS, PAGE = HERE / "results" / "launchers.json", ROOT / "docs" / "hardware.md"
LAUNCHERS = {  # name: template, processes, options
    "one process": ("cpu", 1, []),
    "DDP, 2 processes": ("multi_gpu", 2, ["--main_process_port", "0"]),
    "DDP, 2 machines": ("multi_node", 2, ["--main_process_ip", "127.0.0.1", "--main_process_port", "29511"]),
    "FSDP2, 2 processes": ("fsdp", 2, ["--main_process_port", "0"]),
    "HSDP, 2 x 2 processes": ("hsdp", 4, ["--main_process_port", "0", "--parallelism_config_dp_shard_size", "2"]),
}
PRECISIONS = {"float32": "no", "bfloat16": "bf16"}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"per_device_batch_size": 3},
    "checkpointing": {"gradient_checkpointing": "true"},
    "EMA": {"ema_decay": 0.9},
    "AdamW, bfloat16 moment": {"optimizer": "adamw", "momentum_dtype": "bfloat16", "adam_epsilon": 1e-3},
    "LoRA": {"lora_rank": 2},
    "masked patches": {"objective": "masked_patch_prediction", "per_device_batch_size": 6},  # drawn for each forward
    "compile": {"compile": "true"},
}
_COMPILED = ("one process", "DDP, 2 processes")  # in float32; each takes minutes
_SAME_WEIGHTS = ("accumulation", "checkpointing", "compile")
_MODEL = {"hidden_size": 14, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 22}
_MODEL |= {"image_size": 8, "patch_size": 4}
_SETTINGS = {"dataset": "digits", "eval_split": "test[:103]", "batch_size": 24, "steps": 5, "warmup_steps": 1}
_SETTINGS |= {"learning_rate": 0.05, "eval_every": 5, "eval_batch_size": 32, "num_workers": 0, "report_to": "none"}
_SETTINGS |= {"stall_timeout": 100, "overwrite": "true"}
_LIMIT = 900  # seconds for a launch


def output_of(work: Path, template: str, precision: str, feature: str) -> Path:
    """Return the folder of a run."""
    return work / f"{template}-{precision}" / feature.replace(" ", "-")


def settings_of(feature: str, output: Path, plain: Path) -> list[str]:
    """Return a command, `pretrain` or `finetune`, and its arguments."""
    settings = {**_SETTINGS, **FEATURES[feature], "output_dir": output}
    settings |= {"model": plain} if feature == "LoRA" else {"config": json.dumps(_MODEL)}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return ["finetune" if feature == "LoRA" else "pretrain", *words]


def run_here(file: Path) -> None:
    """Train with each command line of a file; write the error of a failed run beside its output."""
    sys.path.insert(0, str(ROOT))
    from accelerate import Accelerator

    from tests.launched import take_fsdp_on_cpus

    take_fsdp_on_cpus()
    end_training = Accelerator.end_training
    Accelerator.end_training = lambda self: None  # it would end the process group; the next run needs it
    for output, command, *argv in json.loads(file.read_text(encoding="utf-8")):
        try:
            getattr(import_module(f"hf_vit.scripts.{command}"), command)(argv)
        except Exception as error:  # every error goes into the table
            Path(f"{output}.refused").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    end_training(Accelerator())


def launch(launcher: str, precision: str, features: list[str], work: Path) -> dict[str, dict[str, Any]]:
    """Run features with a launcher; return the difference of each, or its error message."""
    template, processes, options = LAUNCHERS[launcher]
    folder = work / f"{template}-{precision}"
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {feature: output_of(work, template, precision, feature) for feature in features}
    plain = output_of(work, "cpu", precision, "plain")
    for output in outputs.values():
        Path(f"{output}.refused").unlink(missing_ok=True)
    lines = [[str(output), *settings_of(feature, output, plain)] for feature, output in outputs.items()]
    (folder / "runs.json").write_text(json.dumps(lines), encoding="utf-8")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes), *options]
    command += ["--config_file", str(ROOT / "training" / "accelerate" / f"{template}.yaml")]
    command += ["--mixed_precision", PRECISIONS[precision]]
    ranks = [["--machine_rank", "0"], ["--machine_rank", "1"]] if template == "multi_node" else [[]]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with (folder / "log").open("w", encoding="utf-8") as log:
        starts = [
            subprocess.Popen(
                [*command, *rank, __file__, "--runs", str(folder / "runs.json")],
                env=environment, stdout=log, stderr=log,
            )
            for rank in ranks
        ]  # fmt: skip
        for process in starts:
            process.wait(_LIMIT)
    return {
        name: judge(output, output_of(work, "cpu", precision, reference_of(launcher, name)))
        for name, output in outputs.items()
    }


def reference_of(launcher: str, feature: str) -> str:
    """Return the feature whose weights in one process must be equal; some features do not change the weights."""
    return "plain" if launcher == "one process" and feature in _SAME_WEIGHTS else feature


def judge(output: Path, reference: Path) -> dict[str, Any]:
    """Return the largest difference of two runs' final weights, relative to the largest weight; or an error message."""
    refusal = Path(f"{output}.refused")
    if output == reference:
        return {"reference": True}
    if refusal.exists():
        return {"refused": " ".join(refusal.read_text(encoding="utf-8").split())[:300]}
    if not (output / "model.safetensors").exists():
        return {"refused": f"the processes ended; see {output.parent / 'log'}"}
    ours, theirs = load_file(output / "model.safetensors"), load_file(reference / "model.safetensors")
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    return {"distance": max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / largest}


def measure(work: Path, again: bool) -> dict[str, dict[str, Any]]:
    """Measure all results, those of one process first; save the results of each launch at once."""
    results = {} if again or not RESULTS.exists() else json.loads(RESULTS.read_text(encoding="utf-8"))
    quick = [name for name in FEATURES if name != "compile"]
    works = [(launcher, precision, quick) for precision in PRECISIONS for launcher in LAUNCHERS]
    for launcher, precision, features in [*works, *((launcher, "float32", ["compile"]) for launcher in _COMPILED)]:
        known = results.setdefault(f"{launcher}, {precision}", {})
        missing = [name for name in features if name not in known]
        if launcher == "one process" and not all(output_of(work, "cpu", precision, name).exists() for name in features):
            missing = features  # the others are compared with its weights
        if missing:
            print(f"{launcher}, {precision}: {', '.join(missing)}", file=sys.stderr, flush=True)
            known |= launch(launcher, precision, missing, work)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def as_markdown(results: dict[str, dict[str, Any]]) -> str:
    """Return the table, with the error messages below it."""
    refusals: list[str] = []
    rows = []
    for key, features in results.items():
        cells = []
        for name in FEATURES:
            result = features.get(name, {})
            if (sentence := result.get("refused")) and sentence not in refusals:
                refusals.append(sentence)
            number = f"[{refusals.index(sentence) + 1}]" if sentence else "not run"
            number = f"{result['distance']:.0e}" if "distance" in result else number
            cells.append("reference" if "reference" in result else number)
        rows.append([key, *cells])
    notes = [f"[{number}] `{sentence}`" for number, sentence in enumerate(refusals, 1)]
    versions = f"torch {torch.__version__}, on CPU processes over gloo."
    return "\n\n".join([table(["launcher, precision", *FEATURES], rows), *notes, f"Run with {versions}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/hardware.md")
    parser.add_argument("--again", action="store_true", help="also repeat runs with saved results")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "hf_vit_launchers")
    parser.add_argument("--runs", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.runs:
        run_here(arguments.runs)
        return
    markdown = as_markdown(measure(arguments.work, arguments.again))
    print(markdown)
    if arguments.write:
        update_section(PAGE, "launchers", markdown)


if __name__ == "__main__":
    main()
