"""The interface of a source: one object for each format of checkpoint, and how any of them is read."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..images.image_processing_hf_vit import HfViTImageProcessor
from ..models.configuration_hf_vit import Size
from ..models.pretrained import HfVisionPreTrainedModel
from .building import StoredArray, build_config, check_required, empty_model, fill, shapes_of, untrained_head
from .checkpoint import Checkpoint
from .inferred import Fields, Inferred, values_of
from .rules import Rule, check_names, check_shapes

Model = HfVisionPreTrainedModel
Shapes = Mapping[str, tuple[int, ...]]
Grid = tuple[int, int] | None


class Request(NamedTuple):
    """What the caller of `convert` states.

    position_grid: (rows, columns) of the table of positions; None for a square.
    weights: a .safetensors file that an .npz is streamed into; None to keep the weights in memory.
    overrides: fields of the configuration that no array shows.
    patch_size: of the model, where it is not that of the stored kernel.
    without_weights: leave the model on the meta device and read no array that is not needed to recognise it.
    """

    position_grid: Grid
    weights: Path | None
    overrides: dict[str, Any]
    patch_size: Size | None = None
    without_weights: bool = False


class Writing(NamedTuple):
    """How a model is written.

    dialect: one of the source's.
    processor: its image processor, where the format has a place for it.
    overwrite: whether the path may be replaced.
    """

    dialect: str
    processor: HfViTImageProcessor | None
    overwrite: bool


class Naming(NamedTuple):
    """How a checkpoint names its arrays.

    dialect: what `conversion.json` says of it.
    arrays: for every name of the rules, where its array is.
    beside: what else the file holds.
    similarity: numbers with which the embeddings of two towers are compared, of those beside the model.
    """

    dialect: dict[str, Any]
    arrays: dict[str, StoredArray] = {}  # noqa: RUF012 - a NamedTuple's default, which nobody changes
    beside: list[str] = []  # noqa: RUF012
    similarity: dict[str, float] = {}  # noqa: RUF012


class Source(ABC):
    """One format of checkpoint.

    head: names of the head's weight and bias.
    outputs_first: whether that weight is (out, in), as in PyTorch.
    required, optional: the arrays that sizes are read from, and how many axes each must have.
    format: what `export` calls it; "" where it cannot be written.
    models: the classes that can be written.
    dialects: what `export` may choose from, the default first; one without a name by default.
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
        """How a checkpoint names its arrays; None where it is of another source."""

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, request: Request) -> Fields:
        """The fields of the configuration, each with its reason.

        Args:
            shapes: of the arrays, by the names of the rules.
        """
        raise NotImplementedError

    def rules(self, config: Any, has_head: bool) -> list[Rule]:
        """A row for every array of a model, of the classifier or the bare encoder."""
        raise NotImplementedError

    def read(self, checkpoint: Checkpoint, naming: Naming, request: Request) -> tuple[Model, Fields, dict[str, Any]]:
        """Read a checkpoint by its rules.

        Returns:
            The model in float32, in evaluation mode, without a head where the file has none or an untrained one; what
            was inferred; and what else `conversion.json` says of it.

        Raises:
            ConversionError: arrays are missing, left over, of the wrong shape or not finite.
        """
        left_out = untrained_head(checkpoint, naming.arrays, self.head, self.outputs_first)
        arrays = {name: stored for name, stored in naming.arrays.items() if not left_out or name not in self.head}
        shapes = shapes_of(checkpoint, arrays)
        check_required(shapes, self.required, self.optional, checkpoint.path.name)
        fields = self.infer(shapes, checkpoint, request)
        has_head = self.head[0] in arrays
        config = build_config({**values_of(fields), **request.overrides})
        rules = self.rules(config, has_head)
        check_names(rules, arrays, checkpoint.path.name)  # before anything of that depth is built
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
        """The preprocessing of its evaluation, as far as it is known: arguments of `HfViTImageProcessor`."""

    def labels(self, checkpoint: Checkpoint, num_labels: int) -> list[str] | None:
        """Names of the classes that it states; None without any."""
        return None

    def lacks(self, model: Model, dialect: str) -> list[str]:
        """Features of a model that cannot be written, each as "the format has no ..."; empty if it can."""
        raise NotImplementedError

    def arrays(self, model: Model, dialect: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The arrays of a model by the names of the rules, one block each, as a dialect has them; of JAX alone.

        Args:
            dialect: what `conversion.json` says of it, see `Naming`.
        """
        raise NotImplementedError

    def write(self, model: Model, path: Path, options: Writing) -> dict[str, Any]:
        """Write a model that lacks nothing; return what the format leaves to whoever loads it."""
        raise NotImplementedError
