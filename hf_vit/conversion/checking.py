"""Report of a conversion with all reasons, without converting."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..models.configuration_hf_vit import Size, as_pair
from .converting import convert_request
from .source import Fields, Request, as_text

_OF_ANY_MODEL = {field.name for field in fields(PreTrainedConfig)} | {"torch_dtype"}
_OTHER_PARTS = {  # names of other parts in files of the original repositories
    "b": "similarity bias",
    "llm": "language model",
    "opt": "optimizer state",
    "t": "similarity temperature",
    "txt": "text tower",
}


def check(
    source: str | Path,
    *,
    labels: str | Path | list[str] | None = None,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    position_grid: Size | None = None,
    preset: str | None = None,
    **overrides: Any,
) -> str:
    """Report the model that `convert` would make: each field with its reason, assumptions, and omitted parts.

    Nothing is written. Only arrays that are needed to recognize the model are read, so values are not checked.

    Args:
        source, labels, image_size, patch_size, position_grid, preset, overrides: arguments of `convert`.

    Returns:
        Lines of text.

    Raises:
        ValueError, OSError: as in `convert`.
    """
    grid = None if position_grid is None else as_pair(position_grid)
    request = Request(grid, None, overrides, patch_size, without_weights=True)
    model, _, found = convert_request(source, request, labels, image_size, preset)
    record: dict[str, Any] = model.conversion_record or {}
    dialect = [f"{record['file']}: names of {record['dialect']['names']}"]
    for name, value in record["dialect"].items():
        if value and name != "names":
            dialect.append(name.replace("_", " ") + ("" if value is True else f" {value}"))
    kind = f"{type(model).__name__}, {model.num_parameters():,} parameters"
    return "\n".join([", ".join([*dialect, *record["dtypes"]]), kind, *_table(found), *describe_skipped(record)])


def describe_skipped(record: dict[str, Any]) -> list[str]:
    """List the parts of a checkpoint that were not converted, one sentence each.

    Args:
        record: the content of `conversion.json`.
    """
    lines = []
    if copy := record.get("copy"):
        lost = f"; the copy lacks the original's {', '.join(copy['without'])}" if copy["without"] else ""
        lines.append(f"read from {copy['name']}, a copy with the same weights{lost}")
    if record["left_out"]:
        lines.append("the head of the checkpoint is all zeros and was dropped: the result is an encoder without a head")
    if record["beside"]:
        names = [f"{name} ({_OTHER_PARTS[name]})" if name in _OTHER_PARTS else name for name in record["beside"]]
        lines.append(f"not converted, other parts of the file: {', '.join(names)}")
    return lines


def _table(found: Fields) -> list[str]:
    """Return one line per field: name, value, reason; a reason equal to the one above is omitted."""
    rows, above = [], ""
    for name, (value, reason, is_assumed) in found.items():
        if name not in _OF_ANY_MODEL:
            reason = f"assumed: {reason}" if is_assumed else reason
            rows.append((name, as_text(value), "" if reason == above else reason))
            above = reason
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [f"  {name:{widths[0]}}  {value:{widths[1]}}  {reason}".rstrip() for name, value, reason in rows]
