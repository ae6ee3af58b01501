"""Make skills/hf-vit/SKILL.md, instructions for coding assistants, from sections of the README and docs/index.md.

    python docs/skill.py

The format is that of https://agentskills.io: front matter with a name, which is that of the folder, and a description.
"""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SKILL = ROOT / "skills" / "hf-vit" / "SKILL.md"
SECTIONS = {  # page -> headings of its sections
    "README.md": ("Start", "Is it for you?", "In Python", "Install"),
    "docs/index.md": ("By task", "Which command reads which format"),
}
HEAD = """---
name: hf-vit
description: >-
  Convert, fine-tune, evaluate, quantize, deploy and publish Vision Transformers (ViT, AugReg, hybrids, SigLIP, BiT)
  with the Python package hf_vit and its command hf-vit. Use it to classify images with a ViT, for Google's JAX
  checkpoints (.npz, vision_transformer, big_vision), or when the user names hf_vit, hf-vit or an augreg: model.
license: Apache-2.0
---

# hf_vit

Run `hf-vit COMMAND --help` for every option. For an error message, read [problems.md](../../docs/problems.md) first.
"""


def skill() -> str:
    """Return the text of the file."""
    parts = [HEAD]
    for page, headings in SECTIONS.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
        parts += [_relink(f"## {heading}\n{sections[heading]}", page) for heading in headings]
    return "\n".join(part.strip() + "\n" for part in parts)


def _relink(text: str, page: str) -> str:
    """Make links between files relative to the skill's folder; a link within the page leads to that page."""

    def link(found: re.Match) -> str:
        path, hash_, anchor = found[1].partition("#")
        target = posixpath.join(posixpath.dirname(page), path) if path else page
        return f"]({posixpath.relpath(target, 'skills/hf-vit')}{hash_}{anchor})"

    return re.sub(r"\]\((?!https?:)([^)\s]+)\)", link, text)


if __name__ == "__main__":
    SKILL.write_text(skill(), encoding="utf-8")
