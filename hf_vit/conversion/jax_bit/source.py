"""Source of BiT's JAX checkpoints: big_transfer's released files, and big_vision's bit_paper.py and bit.py.

The ResNet of a hybrid also has the names of bit.py; `jax` reads hybrids.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...catalog import find_released
from ...catalog.evaluation import image_size_of_bit, preprocessing_of_bit
from ...files.npz import write_npz
from ...models.configuration_hf_bit import ORIGINALS, HfBiTConfig
from ...models.modeling_hf_bit import HfBiTForImageClassification, HfBiTModel
from ..building import UNKNOWN_IMAGE_SIZE, StoredArray, has_head, other_numbers
from ..checkpoint import Checkpoint
from ..inferred import Fields, Inferred, all_because, by
from ..jax.dialects import Dialect
from ..jax.source import arrays_of, evaluated_as, flat_norms
from ..record import record_of
from ..rules import Rule, count_units
from ..source import Model, Naming, Request, Shapes, Source, Writing
from .table import NAMES, rules_for

_PREFIXES = ("opt/target/", "params/", "")


class _JaxBit(Source):
    """Checkpoints of one of the codes, recognised by the name of the root convolution.

    Args:
        code: a key of `NAMES` and of `ORIGINALS`.
        dialect: name of the dialect in `export`.
    """

    format = "jax"
    models = (HfBiTModel, HfBiTForImageClassification)

    def __init__(self, code: str, dialect: str):
        self.code, self.names, self.dialects = code, NAMES[code], (dialect,)
        self.root = self.names.root[0].theirs
        self.head = (self.names.head[0].theirs, self.names.head[1].theirs)
        self.required, self.optional = {self.root: 4}, {self.head[0]: self.names.head_axes}

    def naming(self, checkpoint: Checkpoint, request: Request) -> Naming | None:
        """Return the naming; numbers of convolutions in some files of big_transfer (`..._conv2d_17`) are ignored."""
        for prefix in _PREFIXES:
            own = [name for name in checkpoint.shapes if name.startswith(prefix)]
            arrays = {_plain(name.removeprefix(prefix)): StoredArray(name) for name in own}
            if self.root in arrays:
                beside = {name.split("/")[0] for name in checkpoint.shapes if not name.startswith(prefix)}
                dialect = Dialect(self.code, prefix)._asdict() | flat_norms(checkpoint, arrays)
                return Naming(dialect, arrays, sorted(beside))
        return None

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, request: Request) -> Fields:
        _, _, channels, width = shapes[self.root]
        depths = count_units(shapes, r"(?:resnet/)?block(\d+)/unit(\d+)/", first=1) or [1]
        root = f"the kernel of the root is {by(shapes[self.root])}"
        fields = {
            **all_because({"num_channels": channels, "embedding_size": width}, root),
            "depths": Inferred(depths, f"it has {len(depths)} stages, counted by their units"),
            **all_because(ORIGINALS[self.code], f"as in the code of {self.code}"),
            "image_size": self.image_size(checkpoint),
        }
        if self.head[0] in shapes:
            head = shapes[self.head[0]]
            fields["num_labels"] = Inferred(head[-1], f"the kernel of the head is {by(head)}")
        return fields

    def image_size(self, checkpoint: Checkpoint) -> Inferred:
        return UNKNOWN_IMAGE_SIZE

    def rules(self, config: HfBiTConfig, has_head: bool) -> list[Rule]:
        return rules_for(config, has_head, self.names)

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        return evaluated_as({"preset": "big_vision"}, "files of big_vision", checkpoint.location)

    def lacks(self, model: Model, dialect: str) -> list[str]:
        return other_numbers(model.config, ORIGINALS[self.code])

    def write(self, model: Model, path: Path, options: Writing) -> dict[str, Any]:
        write_npz(path, self.arrays(model, record_of(model).get("dialect", {})))
        return {}

    def arrays(self, model: Model, dialect: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        return arrays_of(model, self.rules(model.config, has_head(model)), self.head, dialect)


class _BigTransfer(_JaxBit):
    """The released files; their names determine the preprocessing and the image size."""

    def image_size(self, checkpoint: Checkpoint) -> Inferred:
        size = image_size_of_bit(checkpoint.location)
        if find_released(checkpoint.location) is None:
            return UNKNOWN_IMAGE_SIZE._replace(value=size)
        return Inferred(size, "evaluation of the released file of this name")

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        settings = preprocessing_of_bit(checkpoint.location)
        return evaluated_as(settings, "files of big_transfer", checkpoint.location)


def _plain(name: str) -> str:
    return re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name)


BIG_TRANSFER = _BigTransfer("big_transfer", "big_transfer")
BIT_PAPER = _JaxBit("bit_paper", "big_vision")
BIT = _JaxBit("bit", "big_vision")
