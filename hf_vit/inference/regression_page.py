"""Results of a regression on a split: a scatter plot, the content of report.html, and the rows of predictions.csv."""

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files.pages import data_uri, page_color
from .regression import measure

if TYPE_CHECKING:
    from .result_page import HeldOut

_PICTURES = 24  # with the largest errors
_COLUMNS = 3  # of plots


def describe_regression(held_out: "HeldOut") -> dict[str, Any]:
    """Return the content of the page."""
    found = held_out.predictions
    errors = np.abs(found["values"] - found["label"])
    spread = np.maximum(found["label"].std(axis=0), np.finfo(np.float32).tiny)
    largest = np.argsort(-(errors / spread).max(axis=1), kind="stable")[:_PICTURES]
    pictures = []
    for row in largest.tolist():
        pairs = zip(held_out.names, found["values"][row].tolist(), found["label"][row].tolist(), strict=True)
        texts = [f"{name} {value:.4g}, not {true:.4g}" for name, value, true in pairs]
        pictures.append(held_out.picture(int(found["index"][row]), text="; ".join(texts)))
    scores = []
    for column, name in enumerate(held_out.names):
        scores.append((name, measure(found["values"][:, [column]], found["label"][:, [column]], [name])))
    return {
        "images": len(errors),
        "scores": scores,
        "scatter": data_uri("png", draw_scatter(held_out)),
        "largest": pictures,
    }


def draw_scatter(held_out: "HeldOut") -> bytes:
    """Return a PNG with the predicted and true values of each target; on the line, they are equal."""
    from matplotlib.figure import Figure

    names = held_out.names
    columns = min(len(names), _COLUMNS)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(4 * columns, 4 * rows), layout="constrained")
    for position, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, position + 1)
        true = held_out.predictions["label"][:, position]
        values = held_out.predictions["values"][:, position]
        ends = [min(true.min(), values.min()), max(true.max(), values.max())]
        axes.plot(ends, ends, color=page_color("line"))
        axes.plot(true, values, linestyle="none", marker="o", markersize=3, alpha=0.6, color=page_color("bar"))
        axes.set_title(name)
        axes.set_xlabel("true")
        axes.set_ylabel("predicted")
        axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def list_values(held_out: "HeldOut") -> Iterator[list[Any]]:
    """Yield the columns' names of predictions.csv, then a row for each image: all targets, then all predictions."""
    yield [*held_out.names, *(f"predicted {name}" for name in held_out.names)]
    for true, values in zip(held_out.predictions["label"], held_out.predictions["values"], strict=True):
        yield [f"{number:.9g}" for number in (*true, *values)]
