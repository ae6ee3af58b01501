"""Facts of a model's card as HTML, with all text of the card escaped."""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from ..files.readme import BEGIN, END
from ..hub.cards import CARD_SOURCES, render_card, split_readme
from ..models.utils import find_file

_ROW = re.compile(r"^\| (.+?) \| (.+?) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_LONGEST = 400  # largest number of characters of a fact


def describe(folder: str | Path, name: str, model: Any) -> str:
    """Return HTML about a model, its training data and its metrics: plain text, without links or images.

    The card is rendered again, from the small files of the folder and the front matter of its README. Other text of the
    README is not used.

    Args:
        folder: a folder of `save_pretrained`, or a name on the Hub.
        name: name of the model on the page.
        model: the loaded model.
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
    """Return a README with readable front matter; any other as ""."""
    try:
        split_readme(readme)
    except ValueError:
        return ""
    return readme


def _facts(head: str, metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """Facts of the card: its table of the architecture, and its front matter."""
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
    """Convert Markdown to plain text, escaped and cut at a limit; a link becomes its text."""
    text = _LINK.sub(r"\1", text).replace("`", "")
    return escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")
