"""Writer of predictions as text, JSON lines or CSV."""

import csv
import json
from collections.abc import Callable
from typing import Any, TextIO


def predictions_writer(kind: str, file: TextIO, in_percent: bool = True) -> Callable[[str, list[Any]], None]:
    """Return a function that writes the predictions of an image, most likely first.

    Args:
        kind: "text", "jsonl" or "csv"; the header of a CSV is written at once.
        file: open text file.
        in_percent: write the scores of a text in percent, for probabilities.
    """
    if kind == "csv":
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["image", "rank", "label", "score"])
        return lambda image, predictions: table.writerows(
            [image, rank, entry.label, entry.score] for rank, entry in enumerate(predictions, start=1)
        )
    if kind == "jsonl":
        return lambda image, predictions: print(
            json.dumps({"image": image, "predictions": [entry._asdict() for entry in predictions]}), file=file
        )
    form = "6.1%" if in_percent else "10.4g"
    return lambda image, predictions: print(
        image, *(f"  {entry.score:{form}}  {entry.label}" for entry in predictions), sep="\n", file=file
    )
