"""The part that sources share whose checkpoints are state dicts of PyTorch modules."""

import re
from abc import abstractmethod
from typing import Any

from ..models.configuration_hf_vision import wrong_types_refused
from .building import StoredArray
from .checkpoint import Checkpoint
from .inferred import Fields, Inferred, all_because
from .rules import ConversionError
from .source import Grid, Naming, Request, Shapes, Source

# Heads of a known width that is not made of heads of 64 (ViT-H; So400m, g and G of big_vision).
_HEADS = {1280: 16, 1152: 16, 1408: 16, 1664: 16}


class TorchSource(Source):
    """A source of state dicts.

    name: what the record calls it.
    marker: an array that every such model has; what stands before its name stands before all names.
    beside: a pattern of arrays that are no part of the encoder.
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
        """A name as the rules have it."""
        return name

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, request: Request) -> Fields:
        file, overrides = checkpoint.path.name, request.overrides
        with wrong_types_refused(f"the config.json beside {file}"):
            stated = self.stated(checkpoint.settings)
        fields = self.sizes(shapes, request.position_grid, file) | all_because(stated, "config.json says so")
        if "hidden_size" in fields and "num_attention_heads" not in {**fields, **overrides}:
            hidden_size = overrides.get("hidden_size", fields["hidden_size"].value)
            fields = {"num_attention_heads": _num_heads(hidden_size, file), **fields}
        return {name: value for name, value in fields.items() if name not in overrides}

    def labels(self, checkpoint: Checkpoint, num_labels: int) -> list[str] | None:
        """Those in the config.json, in words where it describes them.

        A list, or an object from index to name that may leave some out (timm/models/_hub.py, save_config_for_hf).
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
        """The fields of the configuration, each with its reason: all but the number of heads."""

    def stated(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The fields that the config.json beside the weights states."""
        return {}


def _num_heads(hidden_size: int, file: str) -> Inferred:
    """Fused projections do not show it: heads of 64 are the rule."""
    if hidden_size in _HEADS:
        because = f"no array shows it; published models of width {hidden_size} have as many"
        return Inferred(_HEADS[hidden_size], because, is_assumed=True)
    if hidden_size % 64:
        raise ConversionError(
            f"{file} does not say how many attention heads share its {hidden_size} channels, "
            "which are no multiple of 64; state num_attention_heads"
        )
    return Inferred(hidden_size // 64, f"no array shows it; heads of 64 channels: {hidden_size} / 64", is_assumed=True)
