"""Cards of the published checkpoints, rendered from the catalog without the files."""

import json
import re
from pathlib import Path
from typing import Any

from ..catalog import Released, evaluation_of, parse_augreg, released_facts, with_cards
from ..files.output import write_text
from ..models.configuration_hf_bit import VARIANTS as BIT_VARIANTS
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vit import HfViTConfig
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.registry import VARIANTS, config_of_variant
from .cards import render_card

_NUM_CLASSES = {"imagenet-1k": 1000, "imagenet-21k": 21843, "oxford-flowers-102": 102, "oxford-iiit-pet": 37}
_NUM_CLASSES |= {"food101": 101, "sun397": 397}


def write_published_cards(folder: str | Path) -> list[Path]:
    """Write the cards of released.yaml: `<folder>/<family>/<name>.md`."""
    written = []
    for entry in with_cards():
        path = Path(folder) / entry.family / f"{folder_name(entry)}.md"
        write_text(path, render_card(_folder_texts(entry), folder_name(entry)))
        written.append(path)
    return written


def folder_name(entry: Released) -> str:
    """Return the name of a conversion's folder or repository (at most 96 characters, no two hyphens in a row)."""
    name = f"{entry.name}-{entry.family}"
    if entry.variant in BIT_VARIANTS:
        kind = "teacher" if entry.family == "bit_teachers" else "distilled"
        name = entry.name if entry.name.startswith("BiT") else f"BiT-{entry.name}-{kind}"
    if (parsed := parse_augreg(entry.name)) is not None:
        adapted = f"-{parsed.adapted_to}-{parsed.resolution}" if parsed.adapted_to else ""
        name = f"vit-{entry.variant}-augreg-{parsed.data}{adapted}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


def _folder_texts(entry: Released) -> dict[str, str]:
    """Predict the small files of the converted folder from the catalog."""
    config = _configuration(entry)
    resolution = entry.facts.get("resolution")
    known = evaluation_of(entry.location)
    settings = known["processor"] if "patch_size" in known else {"preset": entry.preset}
    processor = HfViTImageProcessor.for_model(config, **settings)
    fields: dict[str, Any] = {"image_size": resolution} if resolution is None else {}
    return {
        "config.json": json.dumps(config.to_dict() | fields),
        "preprocessor_config.json": json.dumps(processor.to_dict() | ({} if resolution else {"size": {}})),
        "conversion.json": json.dumps({"source": entry.location}),
    }


def _configuration(entry: Released) -> HfViTConfig | HfBiTConfig:
    facts = entry.facts
    has_head = facts.get("head", True)
    fields: dict[str, Any] = {"image_size": facts.get("resolution") or 224, **facts.get("config", {})}
    if has_head:
        fields["num_labels"] = _NUM_CLASSES[facts["datasets"][-1]]
    if entry.variant in VARIANTS:
        config = config_of_variant(entry.variant, **fields)
    else:
        width, patch_size = entry.variant.split("/")
        sizes = released_facts()["architectures"][width]
        config = HfViTConfig(**sizes, patch_size=int(patch_size), **fields)
    prefix = type(config).__name__.removesuffix("Config")
    config.architectures = [f"{prefix}{'ForImageClassification' if has_head else 'Model'}"]
    return config
