"""Readers for text, JSON and YAML from untrusted sources: with size limits, and errors that name the file."""

import csv
import io
import os
from typing import Any

import yaml

from .json_files import MAX_DEPTH
from .json_files import parse_json as parse_json
from .json_files import read_json as read_json
from .json_files import read_json_object as read_json_object
from .json_files import read_text as read_text
from .model_files import find_file


def read_image_processor(folder: str | os.PathLike, **where: Any) -> dict[str, Any] | None:
    """Read the settings of the image processor of a folder or a name on the Hub, of any class; None without one.

    They are a preprocessor_config.json, or the part "image_processor" of a processor_config.json, as in transformers.

    Args:
        where: arguments of `from_pretrained` that locate files, such as `revision`.

    Raises:
        ValueError: the file is damaged.
        OSError: the Hub cannot be reached, to find out whether there is one.
    """
    file = find_file(folder, "processor_config.json", where)
    nested = None if file is None else read_json_object(file).get("image_processor")
    if isinstance(nested, dict):
        return nested
    file = find_file(folder, "preprocessor_config.json", where)
    return None if file is None else read_json_object(file)


def read_csv(path: str | os.PathLike) -> tuple[list[str], list[dict[str, str]]]:
    """Read a table with a header; its separator is a comma, or a semicolon or tab, which some spreadsheets write.

    Returns:
        The header, and the rows as `csv.DictReader` reads them.

    Raises:
        ValueError: it is too large, not UTF-8 or not CSV.
        OSError: it cannot be read.
    """
    text = read_text(path)
    separator = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        return list(reader.fieldnames or []), list(reader)
    except csv.Error as error:
        raise ValueError(f"cannot read {path}: line {reader.line_num}: {error}") from None


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


MAX_NODES = 100_000  # values, lists and mappings of a YAML file; 21,843 class names with their numbers are 43,687


class _PlainLoader(yaml.SafeLoader):
    """A YAML loader that refuses aliases, nesting deeper than `MAX_DEPTH`, very many values, and numbers of base 60."""

    depth = count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name); write the value out")
        self.count += 1
        if self.count > MAX_NODES:
            raise yaml.YAMLError(f"it has more than {MAX_NODES:,} values")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(node, yaml.ScalarNode) and ":" in node.value and node.tag.endswith((":int", ":float")):
            raise yaml.YAMLError(f"{node.value[:20]} is a base-60 number in YAML 1.1; quote it")
        return node
