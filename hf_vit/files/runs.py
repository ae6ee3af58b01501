"""Files that training and calibration leave beside a model."""

import os
import shutil
from pathlib import Path

from ..models.utils import find_file
from .output import REPORTS
from .reading import read_json_object


def copy_reports(name: str | os.PathLike, output: str | os.PathLike, *more: str) -> None:
    """Copy the reports of a folder or a name on the Hub to a folder made from it, for its card.

    Args:
        more: names of further files.
    """
    for report in (*REPORTS, *more):
        if file := find_file(name, report, {}, needs_hub=False):
            shutil.copyfile(file, Path(output, report))


def best_checkpoint_dir(folder: str | os.PathLike) -> Path | None:
    """Return the folder best/ of a training run, if its model was better than that of the last step; None otherwise."""
    best = Path(folder, "best")
    file = Path(folder, "metrics.json")
    metrics = read_json_object(file) if file.is_file() and (best / "config.json").is_file() else {}
    name = str(metrics.get("best_metric"))
    reached, last = metrics.get("best"), metrics.get(name)
    if not isinstance(reached, float) or not isinstance(last, float):
        return None
    return best if (reached < last if name == "loss" else reached > last) else None
