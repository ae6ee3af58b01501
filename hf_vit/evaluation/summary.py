"""Metrics as a table for people."""

from collections.abc import Iterator, Mapping
from typing import Any


def summarize(metrics: Mapping[str, Any]) -> str:
    """Return metrics as lines of a name and a value; accuracies are in percent."""
    rows = list(_rows(metrics, ""))
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _rows(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            label = {"samples": "images"}.get(key, key.replace("_", " "))
            yield from _rows(entry, f"{name} {label}".strip())
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):  # a row for each number of shots
        for entry in value:
            (what, number), *rest = entry.items()
            yield from _rows(dict(rest), f"{number} {what}")
    elif not (name.endswith("skipped") and value == 0):
        values = value if isinstance(value, list) else [value]
        yield name, ", ".join(_text(name, one) for one in values)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return "-" if value is None else str(value)
    if "accuracy" in name or name.endswith("spread"):
        return f"{100 * value:.2f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
