"""Coordinates of the learning curve's SVG picture."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

WIDTH, HEIGHT = 460, 200  # size of the frame, in SVG units
PANELS = (("loss", "loss", "eval_loss"), ("accuracy", "accuracy", "eval_accuracy"))
_MARKS = 4  # approximate number of marks on an axis


class Line(NamedTuple):
    """One line of a panel."""

    name: str  # "training" or "held out"
    points: list[tuple[float, float]]


class Mark(NamedTuple):
    """A mark on an axis."""

    place: float
    text: str


class Panel(NamedTuple):
    """One plot; y is 0 at the top."""

    title: str
    lines: list[Line]
    columns: list[Mark]  # optimiser steps
    rows: list[Mark]


def draw_panels(history: Sequence[dict[str, Any]]) -> list[Panel]:
    """Return the panels of loss and accuracy, as far as the history has them."""
    return [panel for names in PANELS if (panel := _draw(history, *names))]


def points_of(history: Sequence[dict[str, Any]], training: str, held_out: str) -> dict[str, list[tuple[float, float]]]:
    """(optimiser step, value) of the lines "training" and "held out", which a history has under these names."""
    return {
        name: [(entry["step"], entry[key]) for entry in history if key in entry]
        for name, key in (("training", training), ("held out", held_out))
    }


def _draw(history: Sequence[dict[str, Any]], title: str, training: str, held_out: str) -> Panel | None:
    found = points_of(history, training, held_out)
    values = [point for points in found.values() for point in points]
    if not values:
        return None
    steps, heights = zip(*values, strict=True)
    last, low, high = max(steps), min(0.0, *heights), max(1.0 if title == "accuracy" else 0.0, *heights)
    high = high if high > low else low + 1

    def place(step: float, value: float) -> tuple[float, float]:
        return round(step / last * WIDTH, 1), round((high - value) / (high - low) * HEIGHT, 1)

    lines = [Line(name, [place(*point) for point in points]) for name, points in found.items() if points]
    columns = [Mark(place(step, 0)[0], f"{step:,.0f}") for step in _ticks(0, last) if step == int(step)]
    rows = [
        Mark(place(0, value)[1], f"{value:.0%}" if title == "accuracy" else f"{value:g}") for value in _ticks(low, high)
    ]
    return Panel(title, lines, columns, rows)


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two bounds: multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / _MARKS
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = int(np.ceil(low / step - 1e-9))
    return [round(number * step, 10) for number in range(first, int(np.floor(high / step + 1e-9)) + 1)]
