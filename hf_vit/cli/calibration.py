"""`hf-vit calibrate`."""

from pathlib import Path
from typing import Annotated

from ..files.output import refuse_existing
from ..files.progress import silence_progress_bars
from .arguments import Model, Overwrite, refuse_source


def calibrate(
    folder: Model,
    output: Annotated[Path, "folder to write"],
    *,
    dataset: Annotated[str, "data set, as in `hf-vit evaluate`"],
    split: Annotated[
        str | None, "split of images that the model was not trained on (default: test, else what training held out)"
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Calibrate a classifier: its probabilities, and what `hf-vit predict --coverage` and `--reject` go by."""
    refuse_source(output, folder)
    refuse_existing(output, overwrite)  # before the work, not after
    silence_progress_bars()
    from ..evaluation.calibration import calibrate

    results = calibrate(folder, dataset, output, split, overwrite=overwrite)
    errors = results["expected_calibration_error"]
    print(f"{results['images']:,} images of {results['split']}; temperature {results['temperature']:.3f}")
    print(f"expected calibration error: {errors['before']:.2%} before, {errors['after']:.2%} after")
    for coverage, found in results["coverage"].items():
        print(f"coverage {coverage}: {found['measured']:.1%} measured, {found['classes']:.2f} classes an image")
    rejection = results["rejection"]
    print(f"none of the classes: {rejection['measured']:.1%} of these images are rejected")
    print(f"saved in {output}")
