"""Check of a model card: missing license, numbers without a source, unknown data sets."""

import re

from ..catalog import released_facts
from ..files.readme import BEGIN, END
from ..models.utils import HUB_NAME
from .cards import split_readme

_PLACEHOLDER = re.compile(r"more information needed", re.IGNORECASE)
_CODE_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
_NUMBER = re.compile(r"\d+(\.\d+)?\s*%")


def check_card(card: str) -> list[str]:
    """Return the problems of a card, a sentence each; none for a good card."""
    metadata = split_readme(card)[0]
    problems = []
    license = metadata.get("license")
    if not license:
        problems.append("the license is missing; give license= (--license), or add `license:` to the front matter")
    elif not all(_LICENSE.fullmatch(str(name)) for name in (license if isinstance(license, list) else [license])):
        problems.append(
            f"the license {license!r} is not an identifier of the Hub (expected one such as apache-2.0 or mit)"
        )
    if _PLACEHOLDER.search(card):
        problems.append("it has the placeholder 'More Information Needed'; replace it, or delete the line")
    named = metadata.get("datasets") or []
    known = {entry["hub"] for entry in released_facts()["datasets"].values()}
    problems += [
        f"the data set {name!r} is not a name on the Hub (expected owner/name)"
        for name in ([named] if isinstance(named, str) else named)
        if name not in known and not HUB_NAME.fullmatch(name)
    ]
    problems += [
        f"{metric.get('type')} {metric.get('value')} in model-index has no source; add `source:` with its URL"
        for model in metadata.get("model-index") or []
        for result in model.get("results") or []
        if not (result.get("source") or {}).get("url")
        for metric in result.get("metrics") or []
    ]
    if BEGIN in card:
        problems += _unsourced_numbers(card.split(BEGIN, 1)[1].split(END, 1)[0])
    return problems


def _unsourced_numbers(part: str) -> list[str]:
    """Find results whose last column, the source, is empty, and percentages outside tables and code blocks."""
    match = re.search(r"^## Results$(.*?)(?=^## |\Z)", part, re.DOTALL | re.MULTILINE)
    problems = []
    for line in _CODE_BLOCK.sub("", match[1]).splitlines() if match else ():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and not cells[-1]:
            problems.append(f"the result {cells[2]} ({cells[0]} {cells[1]}) has no source")
        elif not line.startswith("|") and _NUMBER.search(line):
            problems.append(f"a percentage is not in a table of results: {line.strip()}")
    return problems
