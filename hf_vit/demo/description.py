"""The facts of a model's card, as HTML in which nothing of the card is markup."""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

import yaml

from ..files.readme import BEGIN, END
from ..hub.cards import CARD_SOURCES, render_card, split_readme
from ..models.loading import find_file

_ROW = re.compile(r"^\| (.+?) \| (.+?) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_LONGEST = 400  # characters of a fact


def describe(folder: str | Path, name: str, model: Any) -> str:
    """HTML of what a model is, what it was trained on and what was measured: plain text, without links or images.

    The card is rendered anew, from the small files of the folder and the facts in its README's front matter; prose that
    somebody wrote into the README is left out.

    Args:
        folder: of `save_pretrained`, or a name on the Hub.
        name: how the page calls it.
        model: of that folder.
    """
    texts = {file: _read(folder, file) for file in CARD_SOURCES}
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    texts |= {"config.json": json.dumps(config, default=str), "README.md": _sound(texts["README.md"])}
    card = render_card({file: text for file, text in texts.items() if text}, name)
    metadata = split_readme(card)[0]
    head = card.split(BEGIN, 1)[1].split(END, 1)[0].split("\n## ")[0]
    prose = [line for line in head.splitlines() if line and not line.startswith(("#", "|"))]
    rows = [f"<dt>{_plain(label)}</dt><dd>{_plain(text)}</dd>" for label, text in _facts(head, metadata)]
    return f"<p>{_plain(' '.join(prose))}</p><dl>{''.join(rows)}</dl>"


def _read(folder: str | Path, name: str) -> str:
    file = find_file(folder, name, {})
    return "" if file is None else Path(file).read_text(encoding="utf-8", errors="replace")


def _sound(readme: str) -> str:
    """A README whose front matter can be read; else nothing."""
    try:
        return readme if isinstance(split_readme(readme)[0], dict) else ""
    except yaml.YAMLError:
        return ""


def _facts(head: str, metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """The card's table of the architecture, and what its front matter says."""
    facts = [row for row in _ROW.findall(head) if set(row[0]) - set(" -|")]
    for field, label in (("datasets", "trained on"), ("base_model", "fine-tuned from"), ("license", "licence")):
        if value := metadata.get(field):
            facts.append((label, ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    for entry in metadata.get("model-index") or ():
        for result in entry.get("results") or ():
            metrics = ", ".join(f"{metric['name']} {metric['value']:.4g}" for metric in result["metrics"])
            facts.append((f"on {result['dataset']['name']}", metrics))
    return facts


def _plain(text: str) -> str:
    """Markdown as plain text, escaped and cut where it is long; of a link what it is called."""
    text = _LINK.sub(r"\1", text).replace("`", "")
    return escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")
