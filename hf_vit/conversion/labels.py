"""Names of classes."""

import json
from importlib.resources import files
from pathlib import Path

from .rules import ConversionError

BUILT_IN = ("imagenet1k",)


def read_labels(source: str | Path) -> list[str]:
    """Read names of classes, in the order of the head's outputs.

    Args:
        source: "imagenet1k", or a file: one name per line, or JSON (a list, or an object from index to name).
    """
    if str(source) in BUILT_IN:
        return (files("hf_vit") / "labels" / f"{source}.txt").read_text().splitlines()
    path = Path(source)
    if not path.is_file():
        raise ConversionError(f"labels {str(source)!r} are neither a file nor one of: {', '.join(BUILT_IN)}")
    try:
        text = path.read_text()
        if path.suffix != ".json":
            return [line.strip() for line in text.splitlines() if line.strip()]
        content = json.loads(text)
        return [content[str(index)] for index in range(len(content))] if isinstance(content, dict) else list(content)
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError) as error:
        raise ConversionError(f"{path} does not hold names of classes: {error}") from error
