"""Interface of a source (one object per checkpoint format), and the reading that sources share."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..models.configuration_hf_vit import Size
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.pretrained import HfVisionPreTrainedModel
from .building import StoredArray, build_config, check_required, empty_model, fill, shapes_of, untrained_head
from .checkpoint import Checkpoint
from .inferred import Fields, Inferred, values_of
from .rules import Rule, check_names, check_shapes

Model = HfVisionPreTrainedModel
Shapes = Mapping[str, tuple[int, ...]]
Grid = tuple[int, int] | None


class Request(NamedTuple):
    """Statements of the caller of `convert`.

    position_grid: (rows, columns) of the table of positions; None for a square.
    weights: a .safetensors file to stream an .npz into; None to keep the weights in memory.
    overrides: configuration fields that no array shows.
    patch_size: patch size of the model, if it differs from the stored kernel's.
    without_weights: leave the model on the meta device, and read only the arrays that are needed to recognise it.
    """

    position_grid: Grid
    weights: Path | None
    overrides: dict[str, Any]
    patch_size: Size | None = None
    without_weights: bool = False


class Writing(NamedTuple):
    """Options of writing a model.

    dialect: one of the source's dialects.
    processor: the model's image processor, for formats that store one.
    overwrite: replace what exists.
    """

    dialect: str
    processor: HfViTImageProcessor | None
    overwrite: bool


class Naming(NamedTuple):
    """Naming of a checkpoint's arrays.

    dialect: description of the dialect for `conversion.json`.
    arrays: name in the rules -> place.
    beside: names of the file's other parts.
    similarity: numbers for the similarity of two towers' embeddings, read from the other parts.
    """

    dialect: dict[str, Any]
    arrays: dict[str, StoredArray] = {}  # noqa: RUF012 - a NamedTuple's default, which is never changed
    beside: list[str] = []  # noqa: RUF012
    similarity: dict[str, float] = {}  # noqa: RUF012


class Source(ABC):
    """One format of checkpoints.

    head: names of the head's weight and bias.
    outputs_first: the head's weight is (out, in), as in PyTorch.
    required, optional: arrays that sizes are read from -> number of axes.
    format: name of the format in `export`; "" if it cannot be written.
    models: classes that can be written.
    dialects: dialects that `export` can write, the default first; ("",) for a format without dialects.
    """

    head: tuple[str, str] = ("", "")
    outputs_first: bool = False
    required: Mapping[str, int] = {}
    optional: Mapping[str, int] = {}
    format: str = ""
    models: tuple[type[Model], ...] = ()
    dialects: tuple[str, ...] = ("",)

    @abstractmethod
    def naming(self, checkpoint: Checkpoint, request: Request) -> Naming | None:
        """Return the naming of a checkpoint's arrays; None if it is of another source."""

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, request: Request) -> Fields:
        """Infer the fields of the configuration, each with its reason.

        Args:
            shapes: name in the rules -> shape.
            checkpoint: the open checkpoint.
            request: statements of the caller.
        """
        raise NotImplementedError

    def rules(self, config: Any, has_head: bool) -> list[Rule]:
        """Return a rule for every array of a model: the classifier, or the bare encoder."""
        raise NotImplementedError

    def read(self, checkpoint: Checkpoint, naming: Naming, request: Request) -> tuple[Model, Fields, dict[str, Any]]:
        """Read a checkpoint by its rules.

        Returns:
            The model in float32, in evaluation mode, without a head if the file has no trained head; the inferred
            fields; and further entries for `conversion.json`.

        Raises:
            ConversionError: arrays are missing, unknown, of the wrong shape or not finite.
        """
        left_out = untrained_head(checkpoint, naming.arrays, self.head, self.outputs_first)
        arrays = {name: stored for name, stored in naming.arrays.items() if not left_out or name not in self.head}
        shapes = shapes_of(checkpoint, arrays)
        check_required(shapes, self.required, self.optional, checkpoint.path.name)
        fields = self.infer(shapes, checkpoint, request)
        has_head = self.head[0] in arrays
        config = build_config({**values_of(fields), **request.overrides})
        rules = self.rules(config, has_head)
        check_names(rules, arrays, checkpoint.path.name)  # before a model of that depth is built
        model = empty_model(config, has_head)
        check_shapes(shapes, model.state_dict(), rules, checkpoint.path.name)
        if not request.without_weights:
            fill(model, rules, checkpoint, arrays, request.weights)
        record = {
            "dialect": naming.dialect,
            "dtypes": sorted({checkpoint.dtypes[stored.name] for stored in arrays.values()}),
            "inferred": values_of(fields),
            "overrides": request.overrides,
            "left_out": left_out,
            "beside": naming.beside,
            **({"similarity": naming.similarity} if naming.similarity else {}),
        }
        return model.eval(), fields, record

    @abstractmethod
    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        """Return the known preprocessing of the checkpoint's evaluation, as arguments of `HfViTImageProcessor`."""

    def labels(self, checkpoint: Checkpoint, num_labels: int) -> list[str] | None:
        """Return the class names that the checkpoint states; None without names."""
        return None

    def lacks(self, model: Model, dialect: str) -> list[str]:
        """List features of a model that the format does not support (to complete "the format has no ...")."""
        raise NotImplementedError

    def arrays(self, model: Model, dialect: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in the rules, array) of a model in a dialect; only for JAX formats.

        Args:
            model: the model.
            dialect: description of the dialect, see `Naming`.
        """
        raise NotImplementedError

    def write(self, model: Model, path: Path, options: Writing) -> dict[str, Any]:
        """Write a model that the format supports; return settings that the format does not store."""
        raise NotImplementedError
