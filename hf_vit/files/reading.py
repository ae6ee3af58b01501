"""Readers for text, JSON and YAML from untrusted sources: with size limits, and errors that name the file."""

import json
import os
from typing import Any

import yaml

from .limits import MAX_DEPTH, MAX_TEXT_BYTES


def read_text(path: str | os.PathLike, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a UTF-8 file, with or without a byte order mark.

    Raises:
        ValueError: it is too large or not UTF-8.
        OSError: it cannot be read.
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
        ValueError: it is too large, too deep or not JSON.
        OSError: it cannot be read.
    """
    return parse_json(read_text(path), str(path))


def read_json_object(path: str | os.PathLike) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: it is too large, too deep, not JSON or holds something else.
        OSError: it cannot be read.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} (expected an object with names and values)")
    return content


def parse_json(text: str, name: str) -> Any:
    """Parse JSON.

    Args:
        text: the JSON text.
        name: origin of the text, for messages.

    Raises:
        ValueError: it is too deep or not JSON.
    """
    try:
        content = json.loads(text)
        _check_depth(content)
    except RecursionError:
        raise ValueError(f"cannot read {name}: it is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    return content


def _check_depth(content: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            if isinstance(value, dict | list):
                _check_depth(value, depth + 1)


def read_yaml(path: str | os.PathLike) -> Any:
    """Read a YAML file without aliases.

    Raises:
        ValueError: it is too large, too deep, not YAML or has aliases.
        OSError: it cannot be read.
    """
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, name: str) -> Any:
    """Parse YAML without aliases (nested aliases can expand without bound).

    Args:
        text: the YAML text.
        name: origin of the text, for messages.

    Raises:
        ValueError: it is too deep, not YAML or has aliases.
    """
    try:
        return yaml.load(text, _PlainLoader)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise ValueError(f"{name} is not YAML: {reason}") from None


class _PlainLoader(yaml.SafeLoader):
    """A YAML loader that refuses aliases, and nesting deeper than `MAX_DEPTH`."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name); write the value out")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node
