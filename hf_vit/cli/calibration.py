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
    """Calibrate the probabilities of a classifier, and the sets of classes of `hf-vit predict --coverage`."""
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
    print(f"saved in {output}")
