"""Sources of a card: the small files of a folder, and the catalog's entry of the checkpoint."""

from collections.abc import Mapping
from typing import Any

from ..catalog import Released, find_released
from ..conversion.source import MODELS, build_config
from ..conversion.transformers.names import (
    THEIR_MODELS,
    describe_cost,
    is_classifier,
    translate_processor,
    translate_settings,
)
from ..files.reading import parse_json
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..registration import MODEL_CLASSES


class Sources:
    """Content of a folder's small files, with the catalog's entry of the checkpoint that it was converted from.

    Args:
        texts: texts of config.json and, if they exist, preprocessor_config.json, conversion.json (written by
            `convert`), card_data.json (written by training), calibration.json (written by `calibrate`) and README.md.

    Raises:
        ValueError: a file is not JSON, or config.json is of a model of another package.
    """

    def __init__(self, texts: Mapping[str, str]):
        names = "config.json", "preprocessor_config.json", "conversion.json", "card_data.json", "calibration.json"
        contents = {name: parse_json(texts.get(name, "{}"), name) for name in names}
        for name, content in contents.items():
            if not isinstance(content, dict):
                raise ValueError(f"{name} holds a {type(content).__name__} (expected an object with names and values)")
        self.config, self.processor, self.conversion, self.training, self.calibration = contents.values()
        self.cost = describe_cost(self.config)  # of the nearest preprocessing of transformers' own classes
        self.is_of_transformers = self.config.get("model_type") in THEIR_MODELS
        if self.is_of_transformers:
            config = build_config(translate_settings(self.config))
            model_class = MODELS[type(config)][is_classifier(self.config)]
            self.config = config.to_dict() | {"architectures": [model_class.__name__]}
            self.processor = (
                HfViTImageProcessor(**translate_processor(self.processor)).to_dict() if self.processor else {}
            )
        named = (self.config.get("architectures") or ["no model"])[0]
        if named not in MODEL_CLASSES:
            raise ValueError(
                f"cannot write a card: config.json names {named} (expected an hf_vit model); convert it first with "
                "`hf-vit convert`"
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
