"""Readers of text and JSON from untrusted sources, with size limits and errors that name the file."""

import json
import os
from typing import Any

MAX_TEXT_BYTES = 2**26  # size of a JSON or text file; a config.json with 21,843 class names has 2 MB
MAX_DEPTH = 32  # nesting of lists and objects in JSON and YAML
_MAX_BRACKETS = 2**20  # number of lists and objects in JSON; "[]" takes 30 times as much memory when it is parsed


def read_text(path: str | os.PathLike, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a UTF-8 file, with or without a byte order mark.

    Raises:
        ValueError: the file is too large or not UTF-8.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"cannot read {path}: it has more than {max_bytes} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path}: it is not UTF-8 text (byte {error.start})") from None


def read_json(path: str | os.PathLike) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: the file is too large, nested too deeply or not JSON.
        OSError: the file cannot be read.
    """
    return parse_json(read_text(path), str(path))


def read_json_object(path: str | os.PathLike) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: the file is too large, nested too deeply or not a JSON object.
        OSError: the file cannot be read.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a {type(content).__name__} (expected a JSON object)")
    return content


def parse_json(text: str, name: str) -> Any:
    """Parse JSON.

    Args:
        text: the JSON text.
        name: name of the source, for messages.

    Raises:
        ValueError: the text is nested too deeply, not JSON, or has a key twice in an object.
    """
    if text.count("[") + text.count("{") > _MAX_BRACKETS:
        raise ValueError(f"cannot read {name}: it has more than {_MAX_BRACKETS:,} lists and objects")
    try:
        content = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    level = [content]
    for _ in range(MAX_DEPTH + 1):
        nested = [value for value in level if isinstance(value, dict | list)]
        level = [one for value in nested for one in (value.values() if isinstance(value, dict) else value)]
    if any(isinstance(value, dict | list) for value in level):
        raise ValueError(f"cannot read {name}: it is nested more than {MAX_DEPTH} levels deep")
    return content


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {max(names, key=names.count)!r:.100} twice")
    return content
