"""Files of a training run beside its model: reports, and the best checkpoint."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from .output import own_file
from .reading import read_json_object

# Reports of a training run or a calibration, for the card of a model.
REPORTS = (
    "metrics.json",
    "card_data.json",
    "learning_curve.png",
    "confusion_matrix.png",
    "scatter.png",
    "recipe.yaml",
    "calibration.json",
    "soup.json",
)


def copy_reports(find_report: Callable[[str], str | None], output: str | os.PathLike, *more: str) -> None:
    """Copy the reports beside a model to a folder made from it: for its card, and to find its held-out images.

    Args:
        find_report: function that returns the path of a file beside the model, or None, such as that of `ModelFiles`.
        more: names of further files.
    """
    for report in (*REPORTS, *more):
        file = find_report(report)
        if file is not None:
            with own_file(Path(output, report)) as draft:
                shutil.copyfile(file, draft)


def is_error(metric: str) -> bool:
    """Return whether a smaller value of a metric is better."""
    return metric.partition("/")[0] in ("loss", "mae")


def best_checkpoint_dir(folder: str | os.PathLike) -> Path | None:
    """Return the folder best/ of a training run, if its model was better than that of the last step; None otherwise."""
    best = Path(folder, "best")
    file = Path(folder, "metrics.json")
    if not file.is_file() or not (best / "config.json").is_file():
        return None
    metrics = read_json_object(file)
    name = str(metrics.get("best_metric"))
    reached = metrics.get("best")
    last = metrics.get(name)
    if not isinstance(reached, float) or not isinstance(last, float):
        return None
    is_better = reached < last if is_error(name) else reached > last
    return best if is_better else None
