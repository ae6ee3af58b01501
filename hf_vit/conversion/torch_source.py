"""Base class of sources whose checkpoints are state dicts of PyTorch modules."""

import re
from abc import abstractmethod
from typing import Any

from ..models.configuration_hf_vision import wrong_types_refused
from .building import StoredArray
from .checkpoint import Checkpoint
from .inferred import Fields, Inferred, all_because
from .rules import ConversionError
from .source import Grid, Naming, Request, Shapes, Source

# Width -> number of heads, for known models whose heads do not have 64 channels (ViT-H; big_vision's So400m, g and G).
_HEADS = {1280: 16, 1152: 16, 1408: 16, 1664: 16}


class TorchSource(Source):
    """A source of state dicts.

    name: name in the record.
    marker: name of an array that every such model has; the prefix of this array is the prefix of all arrays.
    beside: pattern of arrays that do not belong to the encoder.
    """

    outputs_first = True
    name: str
    marker: str
    beside: str = ""

    def naming(self, checkpoint: Checkpoint, request: Request) -> Naming | None:
        marked = [name for name in checkpoint.shapes if f".{name}".endswith(f".{self.marker}")]
        if not marked:
            return None
        prefix = min(marked, key=len).removesuffix(self.marker)
        arrays = {name.removeprefix(prefix): StoredArray(name) for name in checkpoint.shapes if name.startswith(prefix)}
        beside = sorted(name for name in arrays if self.beside and re.search(self.beside, name))
        arrays = {self.canonical(name): stored for name, stored in arrays.items() if name not in beside}
        others = sorted(name for name in checkpoint.shapes if not name.startswith(prefix))
        dialect = {"names": self.name, "prefix": prefix, "container": checkpoint.container}
        return Naming(dialect, arrays, beside + others)

    def canonical(self, name: str) -> str:
        """Return the name in the rules."""
        return name

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, request: Request) -> Fields:
        file, overrides = checkpoint.path.name, request.overrides
        with wrong_types_refused(f"the config.json beside {file}"):
            stated = self.stated(checkpoint.settings)
        fields = self.sizes(shapes, request.position_grid, file) | all_because(stated, "stated in config.json")
        if "hidden_size" in fields and "num_attention_heads" not in {**fields, **overrides}:
            hidden_size = overrides.get("hidden_size", fields["hidden_size"].value)
            fields = {"num_attention_heads": _num_heads(hidden_size, file), **fields}
        return {name: value for name, value in fields.items() if name not in overrides}

    def labels(self, checkpoint: Checkpoint, num_labels: int) -> list[str] | None:
        """Return the class names in the config.json, or their descriptions where it has them.

        They are a list, or an object from index to name that may be incomplete (timm/models/_hub.py,
        save_config_for_hf).
        """
        settings = {**checkpoint.settings.get("pretrained_cfg", {}), **checkpoint.settings}
        names = settings.get("label_names") or settings.get("labels")
        if not names:
            return None
        if isinstance(names, dict):
            names = [names.get(str(index), f"LABEL_{index}") for index in range(num_labels)]
        descriptions = settings.get("label_descriptions") or {}
        return [descriptions.get(name, name) for name in names]

    @abstractmethod
    def sizes(self, shapes: Shapes, grid: Grid, file: str) -> Fields:
        """Infer the fields of the configuration, each with its reason, except the number of heads."""

    def stated(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the config.json beside the weights states."""
        return {}


def _num_heads(hidden_size: int, file: str) -> Inferred:
    """Infer the number of heads: fused projections do not show it, so heads of 64 channels are assumed."""
    if hidden_size in _HEADS:
        because = f"no array shows it; as in published models of width {hidden_size}"
        return Inferred(_HEADS[hidden_size], because, is_assumed=True)
    if hidden_size % 64:
        raise ConversionError(
            f"cannot infer the number of attention heads of {file}: its width is {hidden_size} "
            "(expected a multiple of 64); state num_attention_heads"
        )
    return Inferred(hidden_size // 64, f"no array shows it; heads of 64 channels: {hidden_size} / 64", is_assumed=True)
