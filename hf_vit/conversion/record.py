"""`conversion.json`: the record of a conversion, beside the weights."""

import json
from pathlib import Path
from typing import Any

from ..files.versions import versions_of
from ..models.pretrained import CONVERSION_RECORD, HfVisionPreTrainedModel

_PACKAGES = ("hf_vit", "transformers", "torch", "safetensors", "numpy")


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that a conversion uses."""
    return versions_of(_PACKAGES)


def record_of(model: HfVisionPreTrainedModel) -> dict[str, Any]:
    """Return the record of a converted model, or of the folder that it was loaded from; empty without a record."""
    if model.conversion_record is not None:
        return model.conversion_record
    path = Path(model.name_or_path or "") / CONVERSION_RECORD
    return json.loads(path.read_text(encoding="utf-8")) if model.name_or_path and path.is_file() else {}
