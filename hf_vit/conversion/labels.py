"""Names of classes."""

import json
from pathlib import Path
from typing import Any

from ..catalog.class_names import BUILT_IN, built_in_class_names
from .rules import ConversionError


def labels_of_timm(settings: dict[str, Any], num_labels: int) -> list[str] | None:
    """Names of the classes in the config.json of a timm folder, in words where it describes them; None without any.

    A list, or an object from index to name that may leave some out (timm/models/_hub.py, save_config_for_hf).
    """
    settings = {**settings.get("pretrained_cfg", {}), **settings}
    names = settings.get("label_names") or settings.get("labels")
    if not names:
        return None
    if isinstance(names, dict):
        names = [names.get(str(index), f"LABEL_{index}") for index in range(num_labels)]
    descriptions = settings.get("label_descriptions") or {}
    return [descriptions.get(name, name) for name in names]


def read_labels(source: str | Path) -> list[str]:
    """Read names of classes, in the order of the head's outputs.

    Args:
        source: "imagenet1k", or a file: one name per line, or JSON (a list, or an object from index to name).
    """
    if str(source) in BUILT_IN:
        return built_in_class_names(str(source))
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
