"""`hf-vit quantize` and `hf-vit calibrate`."""

from pathlib import Path
from typing import Annotated

from ..files.messages import silence_progress_bars
from ..files.output import refuse_existing
from .arguments import Model, Overwrite

# `place_data` gives both words their values, so that both may be missing for argparse.
Output = Annotated[Path, "folder to write", "OUTPUT", {"nargs": "?"}]


def quantize(
    folder: Model,
    data: Annotated[
        str,
        "folder of calibration images, typical of the model's use; at least 16, preferably 300",
        "DATA",
        {"nargs": "?"},
    ],
    output: Output,
    *,
    calibrate: Annotated[list[str], "calibration images, instead of DATA: files or folders", "IMAGES"] = (),  # pyright: ignore[reportArgumentType]
    min_agreement: Annotated[
        float,
        "smallest share of predictions that must agree with float32, 0 to 1, on the quarter of the images that is held "
        "out",
        "SHARE",
    ] = 0.95,
    overwrite: Overwrite = False,
) -> None:
    """Quantize a classifier to int8, so that it runs faster on a CPU."""
    if not 0 <= min_agreement <= 1:
        raise ValueError(f"--min-agreement is {min_agreement} (expected 0 to 1)")
    refuse_existing(output, overwrite)
    silence_progress_bars()
    from ..runtimes.quantization import quantize

    images = [data] if isinstance(data, str) else data
    record = quantize(folder, output, images, min_agreement=min_agreement, overwrite=overwrite)
    measured, top1, seconds = record["held_out"], record.get("top1"), record["seconds"]
    print(f"calibrated with {record['calibration']['images']} images, measured with {measured['images']} others")
    print(f"layers kept in float32, because their inputs have outliers: {', '.join(record['in_float32']) or 'none'}")
    print(
        f"{measured['agreement']:.1%} of the predictions agree with float32; logits differ by at most "
        f"{measured['largest_logit_difference']:.2f}"
    )
    if top1:
        print(f"top-1: int8 {top1['int8']:.1%}, float32 {top1['float32']:.1%}")
    print(
        f"median time per image: int8 {1000 * seconds['int8']:.1f} ms, PyTorch in float32 "
        f"{1000 * seconds['float32']:.1f} ms ({seconds['float32'] / seconds['int8']:.1f} times as fast)"
    )
    print(f"saved in {output}")


def calibrate(
    folder: Model,
    data: Annotated[str, "dataset, as in `hf-vit evaluate`", "DATA", {"nargs": "?"}],
    output: Output,
    *,
    dataset: Annotated[str | None, "dataset, instead of DATA"] = None,
    split: Annotated[
        str | None,
        "split with images that the model was not trained on (default: test, else the images that training held out)",
    ] = None,
    embeddings: Annotated[
        str | None, "folder of `hf-vit embed` whose features are used instead of computed", "FOLDER"
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Calibrate the probabilities of a classifier, and fit thresholds for `predict --coverage` and `--reject`."""
    refuse_existing(output, overwrite)
    silence_progress_bars()
    from ..evaluation.calibration import calibrate

    results = calibrate(folder, data, output, split, embeddings=embeddings, overwrite=overwrite)
    errors = results["expected_calibration_error"]
    print(f"{results['images']:,} images of {results['split']}; temperature {results['temperature']:.3f}")
    print(f"expected calibration error: {errors['before']:.2%} before, {errors['after']:.2%} after")
    for coverage, found in results["coverage"].items():
        print(f"coverage {coverage}: {found['measured']:.1%} measured, {found['classes']:.2f} classes per image")
    print(f"rejection: {results['rejection']['measured']:.1%} of these images are wrongly rejected")
    print(f"saved in {output}")
