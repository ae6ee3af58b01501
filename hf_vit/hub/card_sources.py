"""Sources of a card: the small files of a folder, and the catalog's entry of the checkpoint."""

import json
from collections.abc import Mapping
from typing import Any

from ..catalog import Released, find_released


class Sources:
    """Content of a folder's small files, with the catalog's entry of the checkpoint that it was converted from.

    Args:
        texts: texts of config.json and, if they exist, preprocessor_config.json, conversion.json (written by
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
        """Flag: the model is a classifier, not an encoder."""
        return "ForImageClassification" in (self.config.get("architectures") or [""])[0]

    @property
    def is_bit(self) -> bool:
        """Flag: the model is a ResNet, not a Vision Transformer."""
        return self.config.get("model_type") == "hf_bit"

    @property
    def data_sets(self) -> list[str]:
        """Data sets that the model was trained on: keys of released.yaml, and that of our training."""
        trained_on = self.training.get("dataset")
        return [*self.facts.get("datasets", ()), *([trained_on] if trained_on else ())]
