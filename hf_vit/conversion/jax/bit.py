"""BiT's JAX checkpoints: big_transfer's released files, and those of big_vision's bit_paper.py and bit.py.

The ResNet of a hybrid also has the names of bit.py; `vit` reads hybrids.
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
from ..checkpoint import Checkpoint
from ..source import (
    UNKNOWN_IMAGE_SIZE,
    Fields,
    Inferred,
    JaxSource,
    Model,
    Naming,
    Request,
    Shapes,
    StoredArray,
    Writing,
    by,
    has_head,
    other_numbers,
    record_of,
    with_reason,
)
from ..tables import Rule, count_units
from .names import Dialect
from .tables import BIT_NAMES, bit_rules
from .vit import arrays_of, evaluated_as, flat_norms, labels_of_released

_PREFIXES = ("opt/target/", "params/", "")


class JaxBiT(JaxSource):
    """Checkpoints of one of the codes, recognised by the name of the root convolution.

    Args:
        code: a key of `BIT_NAMES` and of `ORIGINALS`.
    """

    models = (HfBiTModel, HfBiTForImageClassification)

    def __init__(self, code: str):
        self.code, self.names = code, BIT_NAMES[code]
        self.is_released = code == "big_transfer"  # names of released files determine preprocessing and image size
        self.dialects = ("big_transfer" if self.is_released else "big_vision",)
        self.root = self.names.root[0].theirs
        self.head = (self.names.head[0].theirs, self.names.head[1].theirs)
        self.axes = {self.root: 4, self.head[0]: self.names.head_axes}

    def naming(self, checkpoint: Checkpoint, request: Request) -> Naming | None:
        """Return the naming; numbers of convolutions in some files of big_transfer (`..._conv2d_17`) are ignored."""
        for prefix in _PREFIXES:
            own = {name.removeprefix(prefix): name for name in checkpoint.shapes if name.startswith(prefix)}
            arrays = {re.sub(r"(?<=/standardized_conv2d)_\d+(?=/)", "", name): StoredArray(own[name]) for name in own}
            if self.root in arrays:
                beside = {name.split("/")[0] for name in checkpoint.shapes if not name.startswith(prefix)}
                dialect = Dialect(self.code, prefix)._asdict() | flat_norms(checkpoint, arrays)
                return Naming(dialect, arrays, sorted(beside))
        return None

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, request: Request) -> Fields:
        _, _, channels, width = shapes[self.root]
        depths = count_units(shapes, r"(?:resnet/)?block(\d+)/unit(\d+)/", first=1) or [1]
        root, image_size = f"the kernel of the root is {by(shapes[self.root])}", UNKNOWN_IMAGE_SIZE
        if self.is_released:
            image_size = image_size._replace(value=image_size_of_bit(checkpoint.location))
            if find_released(checkpoint.location) is not None:
                image_size = Inferred(image_size.value, "evaluation of the released file of this name")
        fields = {
            **with_reason({"num_channels": channels, "embedding_size": width}, root),
            "depths": Inferred(depths, f"it has {len(depths)} stages, counted by their units"),
            **with_reason(ORIGINALS[self.code], f"as in the code of {self.code}"),
            "image_size": image_size,
        }
        if self.head[0] in shapes:
            head = shapes[self.head[0]]
            fields["num_labels"] = Inferred(head[-1], f"the kernel of the head is {by(head)}")
        return fields

    def rules(self, config: HfBiTConfig, has_head: bool) -> list[Rule]:
        return bit_rules(config, has_head, self.names)

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        settings = preprocessing_of_bit(checkpoint.location) if self.is_released else {"preset": "big_vision"}
        return evaluated_as(settings, f"files of {self.dialects[0]}", checkpoint.location)

    def labels(self, checkpoint: Checkpoint, num_labels: int) -> list[str] | None:
        return labels_of_released(checkpoint.location, num_labels)

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        return other_numbers(model.config, ORIGINALS[self.code])

    def write(self, model: Model, path: Path, options: Writing) -> dict[str, Any]:
        write_npz(path, self.arrays(model, record_of(model).get("dialect", {})))
        return {}

    def arrays(self, model: Model, dialect: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        return arrays_of(model, self.rules(model.config, has_head(model)), self.head, dialect)
