"""BiT's JAX checkpoints: big_transfer's released files, and bit_paper.py and bit.py of big_vision.

A ResNet in front of a ViT has the names of bit.py too, beside those of the ViT: see `jax`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...catalog.evaluation import image_size_of_bit, preprocessing_of_bit
from ...files.npz import write_npz
from ...models.configuration_hf_bit import ORIGINALS, HfBiTConfig
from ...models.modeling_hf_bit import HfBiTForImageClassification, HfBiTModel
from ..building import StoredArray, has_head, other_numbers
from ..checkpoint import Checkpoint
from ..jax.dialects import Dialect
from ..jax.source import arrays_of, flat_norms
from ..record import record_of
from ..rules import Rule, count_units
from ..source import Model, Naming, Request, Shapes, Source, Writing
from .table import NAMES, rules_for

_PREFIXES = ("opt/target/", "params/", "")


class _JaxBit(Source):
    """What one of the codes writes; the name of the root convolution tells them from each other.

    Args:
        code: a key of `NAMES` and of `ORIGINALS`.
        dialect: what `export` calls it.
    """

    format = "jax"
    models = (HfBiTModel, HfBiTForImageClassification)

    def __init__(self, code: str, dialect: str):
        self.code, self.names, self.dialects = code, NAMES[code], (dialect,)
        self.root = self.names.root[0].theirs
        self.head = (self.names.head[0].theirs, self.names.head[1].theirs)
        self.required, self.optional = {self.root: 4}, {self.head[0]: self.names.head_axes}

    def naming(self, checkpoint: Checkpoint, request: Request) -> Naming | None:
        """Some files of big_transfer number their convolutions (`standardized_conv2d_17`), which says nothing."""
        for prefix in _PREFIXES:
            own = [name for name in checkpoint.shapes if name.startswith(prefix)]
            arrays = {_plain(name.removeprefix(prefix)): StoredArray(name) for name in own}
            if self.root in arrays:
                beside = {name.split("/")[0] for name in checkpoint.shapes if not name.startswith(prefix)}
                dialect = Dialect(self.code, prefix)._asdict() | flat_norms(checkpoint, arrays)
                return Naming(dialect, arrays, sorted(beside))
        return None

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, request: Request) -> dict[str, Any]:
        _, _, channels, width = shapes[self.root]
        depths = count_units(shapes, r"(?:resnet/)?block(\d+)/unit(\d+)/", first=1) or [1]
        fields = {"num_channels": channels, "embedding_size": width, "depths": depths, **ORIGINALS[self.code]}
        return {**fields, "num_labels": shapes[self.head[0]][-1]} if self.head[0] in shapes else fields

    def rules(self, config: HfBiTConfig, has_head: bool) -> list[Rule]:
        return rules_for(config, has_head, self.names)

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> dict[str, Any]:
        return {"preset": "big_vision"}

    def lacks(self, model: Model, dialect: str) -> list[str]:
        return other_numbers(model.config, ORIGINALS[self.code])

    def write(self, model: Model, path: Path, options: Writing) -> dict[str, Any]:
        write_npz(path, self.arrays(model, record_of(model).get("dialect", {})))
        return {}

    def arrays(self, model: Model, dialect: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        return arrays_of(model, self.rules(model.config, has_head(model)), self.head, dialect)


class _BigTransfer(_JaxBit):
    """The released files: their names say the preprocessing, and the image size that no array shows."""

    def read(self, checkpoint: Checkpoint, naming: Naming, request: Request) -> tuple[Model, dict[str, Any]]:
        model, record = super().read(checkpoint, naming, request)
        size = request.overrides.get("image_size", image_size_of_bit(checkpoint.location))
        model.set_image_size(size, processor_follows=True)
        return model, record

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> dict[str, Any]:
        return preprocessing_of_bit(checkpoint.location)


def _plain(name: str) -> str:
    return re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name)


BIG_TRANSFER = _BigTransfer("big_transfer", "big_transfer")
BIT_PAPER = _JaxBit("bit_paper", "big_vision")
BIT = _JaxBit("bit", "big_vision")
