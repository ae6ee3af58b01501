"""What a card is made of: the small files of a folder, and what the catalog knows of the checkpoint."""

import json
from collections.abc import Mapping
from typing import Any

from ..catalog import Released, find_released


class Sources:
    """What the small files of a folder say, with the catalog's entry of the checkpoint it was converted from.

    Args:
        texts: of config.json, and where there are any of preprocessor_config.json, conversion.json (written by
            `convert`), card_data.json (written by training) and README.md.
    """

    def __init__(self, texts: Mapping[str, str]):
        self.config: dict[str, Any] = json.loads(texts["config.json"])
        self.processor, self.conversion, self.training = (
            json.loads(texts.get(name, "{}"))
            for name in ("preprocessor_config.json", "conversion.json", "card_data.json")
        )
        self.readme = texts.get("README.md", "")
        source = self.conversion.get("source")
        self.released: Released | None = None if source is None else find_released(source)
        self.facts: dict[str, Any] = {} if self.released is None else self.released.facts

    @property
    def classifies(self) -> bool:
        return "ForImageClassification" in (self.config.get("architectures") or [""])[0]

    @property
    def is_bit(self) -> bool:
        """Whether it is a ResNet and not a Vision Transformer."""
        return self.config.get("model_type") == "hf_bit"

    @property
    def data_sets(self) -> list[str]:
        """Keys of released.yaml, or what training was given."""
        trained_on = self.training.get("dataset")
        return [*self.facts.get("datasets", ()), *([trained_on] if trained_on else ())]
