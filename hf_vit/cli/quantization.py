"""`hf-vit quantize`."""

from pathlib import Path
from typing import Annotated, Any

from ..files.output import refuse_existing
from ..files.progress import silence_progress_bars
from .arguments import Model, Overwrite, refuse_source


def quantize(
    folder: Model,
    output: Annotated[Path, "folder to write"],
    *,
    calibrate: Annotated[
        list[str],
        "calibration images, typical for the model's use: files or folders; at least 16, better 300",
        {"metavar": "IMAGES"},
    ],
    min_agreement: Annotated[
        float,
        "smallest share of predictions that must agree with float32, on every fourth image",
        {"metavar": "SHARE"},
    ] = 0.95,
    overwrite: Overwrite = False,
) -> None:
    """Quantize a classifier to int8, to run faster on a CPU."""
    if not 0 <= min_agreement <= 1:
        raise ValueError(f"--min-agreement is {min_agreement} (expected a share, 0 to 1)")
    refuse_source(output, folder)
    refuse_existing(output, overwrite)  # before the work, not after
    silence_progress_bars()
    from ..quantization import quantize

    record = quantize(folder, output, calibrate, min_agreement=min_agreement, overwrite=overwrite)
    print(*_sentences(record, output), sep="\n")


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
