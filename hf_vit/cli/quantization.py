"""`hf-vit quantize`."""

import argparse
from pathlib import Path
from typing import Any

from ..files.output import refuse_existing
from ..files.progress import silence_progress_bars
from .arguments import Commands, add_command, refuse_source


def add_commands(commands: Commands) -> None:
    """Add `quantize`."""
    command = add_command(commands, "quantize", _quantize, "quantize a classifier to int8, to run faster on a CPU")
    command.add_argument("folder", help="model: a folder of save_pretrained, or a name on the Hub")
    command.add_argument("output", type=Path, help="folder to write")
    command.add_argument(
        "--calibrate",
        nargs="+",
        required=True,
        metavar="IMAGES",
        help="calibration images, typical for the model's use: files or folders; at least 16, better 300",
    )
    command.add_argument(
        "--min-agreement",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="smallest share of predictions that must agree with float32, on every fourth image (default 0.95)",
    )
    command.add_argument("--overwrite", action="store_true", help="replace the output folder")


def _quantize(arguments: argparse.Namespace) -> None:
    if not 0 <= arguments.min_agreement <= 1:
        raise ValueError(f"--min-agreement is {arguments.min_agreement} (expected a share, 0 to 1)")
    refuse_source(arguments.output, arguments.folder)
    refuse_existing(arguments.output, arguments.overwrite)  # before the work, not after
    silence_progress_bars()
    from ..quantization import quantize

    record = quantize(
        arguments.folder,
        arguments.output,
        arguments.calibrate,
        min_agreement=arguments.min_agreement,
        overwrite=arguments.overwrite,
    )
    print(*_sentences(record, arguments.output), sep="\n")


def _sentences(record: dict[str, Any], output: Path) -> list[str]:
    measured, top1, seconds = record["held_out"], record.get("top1"), record["seconds"]
    left_out = record["in_float32"]
    sizes = {
        what: sum(file.stat().st_size for file in output.glob(pattern)) / 1e6
        for what, pattern in {"int8": "program.*", "float32": "*.safetensors"}.items()
    }
    return [
        f"calibrated with {record['calibration']['images']} images, measured with {measured['images']} others",
        f"kept in float32, because their inputs have outliers: {', '.join(left_out) or 'no linear layer'}",
        f"{measured['agreement']:.1%} of the predictions agree with float32; logits differ by at most "
        f"{measured['largest_logit_difference']:.2f}",
        *([f"top-1: int8 {top1['int8']:.1%}, float32 {top1['float32']:.1%}"] if top1 else []),
        f"the program has {sizes['int8']:.1f} MB, the float32 weights beside it {sizes['float32']:.1f} MB",
        f"one image: int8 {1000 * seconds['int8']:.1f} ms, PyTorch in float32 {1000 * seconds['float32']:.1f} ms "
        f"({seconds['float32'] / seconds['int8']:.1f} times as fast; medians of wall clock, in turns)",
        f"saved in {output}",
    ]
