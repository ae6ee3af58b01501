"""Model cards: the README of a repository, rendered from a folder.

Our part of a card is between two marks and is rendered again at every push. The user's own text around it is kept.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files.messages import shorten
from ..files.reading import parse_yaml, read_text
from ..files.readme import BEGIN, END
from ..models.utils import check_model_path, redact_secrets
from .card_metadata import metadata_yaml, render_metadata
from .card_sections import render_sections
from .card_sources import Sources

CARD_SOURCES = ("config.json", "preprocessor_config.json", "conversion.json", "card_data.json", "calibration.json")
CARD_SOURCES += ("README.md",)
_SPACE_LINK = re.compile(r"\(https://huggingface\.co/spaces/([\w.-]+/[\w.-]+)\)")
_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)
# Sentences of the card that transformers writes by default; it is not the user's own text.
_NOBODYS_TEXT = ("This model card has been automatically generated.", "[More Information Needed]")
# Empty sections of Trainer's card.
_EMPTY_SECTION = re.compile(r"^#+ [^\n]*\n+more information needed[ \t]*(?:\n+|\Z)", re.IGNORECASE | re.MULTILINE)


def render_card(
    texts: Mapping[str, str],
    name: str,
    *,
    license: str | None = None,
    tags: Sequence[str] = (),
    space: str | None = None,
) -> str:
    """Render the card of a folder.

    Args:
        texts: contents of the folder's small files, see `Sources`; the user's own text in README.md is kept.
        name: name of the repository or folder, for the title and the example.
        license: such as "apache-2.0"; None: that of the README, or of the known source.
        tags: more tags.
        space: name of a Space with the model's page; None: that of the README, if any.
    """
    sources = Sources(texts)
    if space is None and (link := _SPACE_LINK.search(sources.readme)):
        space = link[1]
    own_metadata, before, after = split_readme(sources.readme)
    metadata = render_metadata(sources, name, own_metadata, license, tags)
    sections = render_sections(sources, name, metadata.get("license"), has_title=not before, space=space)
    part = f"{BEGIN}\n{redact_secrets(sections)}{END}"
    return f"---\n{metadata_yaml(metadata)}---\n" + "\n\n".join(text for text in (before, part, after) if text) + "\n"


def render_folder_card(folder: str | Path, *, name: str | None = None, license: str | None = None) -> str:
    """Render the card of a folder of `save_pretrained`; see `render_card`.

    Raises:
        OSError: the folder holds no model.
    """
    folder = Path(folder)
    check_model_path(folder)
    texts = {name: read_source(folder / name) for name in CARD_SOURCES if (folder / name).is_file()}
    return render_card(texts, name or folder.resolve().name, license=license)


def read_source(path: str | Path) -> str:
    """Read a small file of a folder, with the line ends and the byte order mark of any system."""
    return read_text(path).replace("\r\n", "\n")


def split_readme(text: str) -> tuple[dict[str, Any], str, str]:
    """Split a README into its front matter and the user's own text before and after our part.

    Raises:
        ValueError: the front matter is not YAML, or its tags or data sets are not names.
    """
    match = _FRONT_MATTER.match(text)
    metadata = (parse_yaml(match[1], "the front matter of README.md") if match else None) or {}
    _check_metadata(metadata)
    body = text[match.end() :] if match else text
    if BEGIN in body and END in body:
        before, rest = body.split(BEGIN, 1)
        return metadata, before.strip(), rest.split(END, 1)[1].strip()
    if all(sign in body for sign in _NOBODYS_TEXT):
        return metadata, "", ""
    return metadata, _EMPTY_SECTION.sub("", body).strip(), ""


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict):
        raise ValueError(
            f"the front matter of README.md is {shorten(metadata)} (expected fields, such as license: mit)"
        )
    for field in ("tags", "datasets"):
        value = metadata.get(field)
        names = [value] if isinstance(value, str) else value or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{field} in README.md is {shorten(value)} (expected a list of names)")
