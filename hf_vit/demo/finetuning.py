"""Fine-tuning at a higher resolution, as in the paper, on the digits: `hf-vit finetune` with Accelerate's launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

IMAGE_SIZE = 24  # the embedded model was trained at 16
_SETTINGS = {
    "dataset": "digits",
    "eval_split": "test",
    "image_size": IMAGE_SIZE,
    "epochs": 10,
    "batch_size": 64,
    "learning_rate": 0.03,
    "warmup_steps": 20,
    "crop_area": "0.7,1",
    "flip": "false",
    "num_workers": 0,
    "report_to": "none",
    "overwrite": "true",
}


def finetune_at_higher_resolution(folder: Path, output: Path) -> tuple[float, float]:
    """Fine-tune the model in `folder` at 24 pixels; return its accuracy on the held-out digits before and after.

    Args:
        folder: a folder of `save_pretrained`.
        output: folder for the metrics before, and for the fine-tuned model.
    """
    _launch(
        "evaluate", {"model": folder, "dataset": "digits", "image_size": IMAGE_SIZE, "output_dir": output / "before"}
    )
    before = _read_accuracy(output / "before")
    _launch("finetune", {"model": folder, "output_dir": output / "after", **_SETTINGS})
    return before, _read_accuracy(output / "after")


def _launch(command: str, settings: dict[str, object]) -> None:
    """Run `accelerate launch -m hf_vit.cli COMMAND` on one CPU process."""
    options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--module"]
    subprocess.run(
        [*launcher, "hf_vit.cli", command, *options],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def _read_accuracy(folder: Path) -> float:
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["accuracy"]
