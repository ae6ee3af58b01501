"""What all sources share: the interface of a source, reading by rules, and inference from shapes."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..files.reading import read_json_object
from ..files.removed_names import with_new_keys
from ..files.safetensors_stream import write_safetensors
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vit import HfVisionConfig, HfViTConfig, HfViTHybridConfig
from ..models.modeling_hf_bit import HfBiTForImageClassification, HfBiTModel
from ..models.modeling_hf_vit_variants import (
    HfViTForImageClassification,
    HfViTHybridForImageClassification,
    HfViTHybridModel,
    HfViTModel,
)
from ..models.pretrained import CONVERSION_RECORD, HfVisionPreTrainedModel
from ..models.sizes import MAX_STAGES, Size
from .checkpoint import Checkpoint
from .tables import ConversionError, Rule, UnknownGridError, check_arrays, check_values, expand
from .weight_sets import choose_weights

Model = HfVisionPreTrainedModel
Grid = tuple[int, int] | None


class Inferred(NamedTuple):
    """A value inferred from a checkpoint.

    value: the value.
    reason: the reason, with numbers.
    is_assumed: the checkpoint does not show the value, so it may be wrong.
    """

    value: Any
    reason: str
    is_assumed: bool = False


Fields = dict[str, Inferred]


class Shapes(dict[str, tuple[int, ...]]):
    """Name in the rules -> shape of an array; infers fields of the configuration from them."""

    def sizes(self, name: str, optional: bool = False, **axes: int) -> Fields:
        """Read fields off the axes of an array, field=axis; no fields without an optional array."""
        if optional and name not in self:
            return {}
        sizes = {field: self[name][axis] for field, axis in axes.items()}
        return with_reason(sizes, f"{name} is {format_size(self[name])}")

    def patch_size(self, name: str, rows: int) -> Inferred:
        """Infer the patch size from a kernel, whose axes `rows` and `rows + 1` are those of a patch."""
        return Inferred(one_or_pair(*self[name][rows : rows + 2]), f"{name} is {format_size(self[name])}")

    def has(self, name: str) -> Inferred:
        """Infer True if an array of this name exists, else False."""
        return Inferred(name in self, f"there is {'an array' if name in self else 'no'} {name}")

    def layers(self, pattern: str) -> Inferred:
        """Infer the number of encoder blocks: of different groups in names that begin with a pattern, at least 1."""
        blocks = {match[1] for name in self if (match := re.match(pattern, name))}
        return Inferred(len(blocks) or 1, "the number of encoder blocks")

    def stages(self, pattern: str, first: int) -> Inferred:
        """Infer the units of each stage of a ResNet; an empty stage counts 1, so that its arrays are reported missing.

        Args:
            pattern: regular expression of the beginning of names; its groups are the numbers of stage and unit.
            first: their first number.
        """
        depths: dict[int, int] = {}
        for match in filter(None, (re.match(pattern, name) for name in self)):
            stage, unit = int(match[1]) - first, int(match[2]) - first
            depths[stage] = max(depths.get(stage, 0), unit + 1)
        stages = min(max(depths, default=-1), MAX_STAGES) + 1  # the configuration refuses more
        units = [depths.get(stage, 1) for stage in range(stages)]
        return Inferred(units, f"the ResNet has {stages} stages, counted by their units")


class ArrayRef(NamedTuple):
    """Where and how an array is stored in a file.

    name: name in the file.
    index: index in a stack of several arrays; None without a stack.
    adapt: function that gives an array of the file the shape that the rules expect.
    """

    name: str
    index: int | None = None
    adapt: Callable[[torch.Tensor], torch.Tensor] = lambda array: array


@dataclass(frozen=True)
class ConvertOptions:
    """Arguments of `convert`.

    position_grid: (rows, columns) of the table of positions; None for a square.
    weights: a .safetensors file to stream an .npz into; None to keep the weights in memory.
    overrides: configuration fields that no array shows.
    labels: class names, or their file; None for those of the source.
    image_size: image size of the model, if it differs from the stored positions'.
    patch_size: patch size of the model, if it differs from the stored kernel's.
    preset: preset of the image processor; None for the source's.
    without_weights: leave the model on the meta device, and read only the arrays that are needed to recognize it.
    weight_set: which of several sets of weights to read, see `choose_weights`.
    head: name of the layer that is the head, for a file of PyTorch in which it has a name of its own.
    variant: of the files of weights in a folder with a config.json, such as "fp16".
    """

    position_grid: Grid = None
    weights: Path | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    labels: str | Path | list[str] | None = None
    image_size: Size | None = None
    patch_size: Size | None = None
    preset: str | None = None
    without_weights: bool = False
    weight_set: str | None = None
    head: str | None = None
    variant: str | None = None


class KeyMapping(NamedTuple):
    """KeyMapping of a checkpoint's arrays.

    dialect: description of the dialect for `conversion.json`.
    arrays: name in the rules -> stored array.
    other_parts: names of the file's other parts.
    similarity: numbers for the similarity of two towers' embeddings, read from the other parts.
    """

    dialect: dict[str, Any]
    arrays: dict[str, ArrayRef] = {}  # noqa: RUF012 - a NamedTuple's default, which is never changed
    other_parts: list[str] = []  # noqa: RUF012
    similarity: dict[str, float] = {}  # noqa: RUF012


class Source(ABC):
    """One format of checkpoints.

    format: its name in `export`; "" for a format that is only read.
    models: classes that can be written.
    dialects: dialects that `export` can write, the default first; ("",) for a format without dialects.
    """

    format: str = ""
    models: tuple[type[Model], ...] = ()
    dialects: tuple[str, ...] = ("",)

    @abstractmethod
    def naming(self, checkpoint: Checkpoint, options: ConvertOptions) -> KeyMapping | None:
        """Return the naming of a checkpoint's arrays; None if it is of another source."""

    @abstractmethod
    def read(
        self, checkpoint: Checkpoint, naming: KeyMapping, options: ConvertOptions
    ) -> tuple[Model, Fields, dict[str, Any]]:
        """Read a checkpoint.

        Returns:
            The model in float32, in evaluation mode, without a head if the file has no trained head; the inferred
            fields; and further entries for `conversion.json`.

        Raises:
            ConversionError: arrays are missing, unknown, of the wrong shape or not finite.
        """

    @abstractmethod
    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        """Return the known preprocessing of the checkpoint's evaluation, as arguments of `HfViTImageProcessor`."""

    def labels(self, checkpoint: Checkpoint, num_labels: int) -> list[str] | None:
        """Return the class names that the checkpoint states; None without names."""
        return None

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        """List settings of a model that the format cannot store, see `unsupported_fields`."""
        raise NotImplementedError

    def write(self, model: Model, path: Path, dialect: str, processor: Any) -> Any:
        """Write a model that the format supports, and read it back.

        Args:
            path: a file, or an empty folder, that takes its place after this call.
            dialect: one of the source's dialects.
            processor: the model's image processor, for formats that store one.

        Returns:
            Settings that the format does not store, if there are any.
        """
        raise NotImplementedError


class RuleSource(Source):
    """A source whose arrays are read by rules.

    head: names of the head's weight and bias.
    outputs_first: the head's weight is (out, in), as in PyTorch.
    """

    head: tuple[str, str]
    outputs_first: bool = False

    @abstractmethod
    def infer(self, shapes: Shapes, checkpoint: Checkpoint, naming: KeyMapping, options: ConvertOptions) -> Fields:
        """Infer the fields of the configuration, each with its reason.

        Args:
            shapes: name in the rules -> shape.
            checkpoint: the open checkpoint.
            naming: naming of its arrays.
            options: statements of the caller.
        """

    @abstractmethod
    def table(self, config: Any) -> list[Rule]:
        """Return the table of a model's parameters; see `expand`."""

    def rules(self, model: Model) -> list[Rule]:
        """Return a rule for every parameter of a model: the classifier, or the bare encoder.

        Raises:
            ConversionError: the table has no row for a parameter.
        """
        rules, names = expand(self.table(model.config), model.state_dict()), set(model.state_dict())
        if missing := sorted(names - {rule.ours for rule in rules}):
            raise ConversionError(f"files of this format have no array for {', '.join(missing)}")
        return rules

    def read(
        self, checkpoint: Checkpoint, naming: KeyMapping, options: ConvertOptions
    ) -> tuple[Model, Fields, dict[str, Any]]:
        skipped = self._untrained_head(checkpoint, naming.arrays)
        arrays = {name: stored for name, stored in naming.arrays.items() if not skipped or name not in self.head}
        shapes = Shapes()
        for name, stored in arrays.items():
            empty = torch.empty(checkpoint.shapes[stored.name], device="meta")
            shapes[name] = tuple(_in_rules(stored, empty).shape)
        fields = self.infer(shapes, checkpoint, naming, options)
        config = build_config({**values_of(fields), **options.overrides})
        with torch.device("meta"):
            model = MODELS[type(config)][self.head[0] in arrays](config)
        rules = self.rules(model)
        check_arrays(rules, shapes, model.state_dict())
        if not options.without_weights:
            order = {name: number for number, name in enumerate(checkpoint.shapes)}
            rules = sorted(rules, key=lambda rule: order[arrays[rule.theirs].name])
            converted = _convert_arrays(rules, checkpoint, arrays)
            if options.weights is None or not checkpoint.streams:
                model.load_state_dict(dict(converted), assign=True)
            else:  # the model stays empty
                parameters = model.state_dict()
                sizes = {rule.ours: tuple(parameters[rule.ours].shape) for rule in rules}
                write_safetensors(options.weights, sizes, converted)
        record = {
            "dialect": naming.dialect,
            "dtypes": sorted({checkpoint.dtypes[stored.name] for stored in arrays.values()}),
            "inferred": values_of(fields),
            "overrides": options.overrides,
            "dropped": skipped,
            "other_parts": naming.other_parts,
            **({"similarity": naming.similarity} if naming.similarity else {}),
        }
        return model.eval(), fields, record

    def _untrained_head(self, checkpoint: Checkpoint, arrays: Mapping[str, ArrayRef]) -> dict[str, dict[str, Any]]:
        """Describe an untrained head (weight all zero, bias constant), with JAX's shape; {} for any other head."""
        if any(name not in arrays for name in self.head):
            return {}
        weight, bias = (checkpoint.read(arrays[name].name) for name in self.head)
        if weight.ndim < 2 or weight.any() or not bias.ndim or (bias != bias[0]).any():
            return {}
        shape = [weight.shape[1], weight.shape[0]] if self.outputs_first else list(weight.shape)
        return {"head": {"shape": shape, "bias": float(bias[0])}}


# Width -> number of heads of the published models (timm 1.0.31, torchvision 0.28, DeiT, MAE, DINO), of which no array
# shows it. Wide models have heads of more than 64 channels.
_HEADS = {192: 3, 384: 6, 512: 8, 640: 10, 768: 12, 896: 14, 1024: 16, 1152: 16, 1280: 16, 1408: 16, 1536: 16, 1664: 16}


class TorchSource(RuleSource):
    """A source of state dicts.

    name: name in the record.
    marker: name of an array that every such model has; the prefix of this array is the prefix of all arrays.
    not_encoder: pattern of arrays that do not belong to the encoder.
    encoder: the beginnings of names of the encoder's arrays, up to the first point.
    """

    outputs_first = True
    name: str
    marker: str
    not_encoder: str = "(?!)"  # matches no name
    encoder: frozenset[str]

    def naming(self, checkpoint: Checkpoint, options: ConvertOptions) -> KeyMapping | None:
        names = checkpoint.shapes
        prefixes = [name.removesuffix(self.marker) for name in names if f".{name}".endswith(f".{self.marker}")]
        if not prefixes:
            return None
        wanted = None if options.weight_set == checkpoint.container else options.weight_set
        prefix = choose_weights(sorted(prefixes, key=len), wanted, checkpoint.path.name)
        arrays: dict[str, ArrayRef] = {}
        skipped = []
        others: dict[str, ArrayRef] = {}
        for name in names:
            bare = name.removeprefix(prefix)
            if _longest_prefix(name, prefixes) != prefix:
                others[name] = ArrayRef(name)
            elif re.search(self.not_encoder, bare):
                skipped.append(bare)
            else:
                arrays[self.canonical(bare)] = ArrayRef(name)
        dialect = {"names": self.name, "prefix": prefix, "container": checkpoint.container}
        if self.head[0] not in arrays:
            head = self._find_head(checkpoint, arrays, others, options.head)
            if head is not None:
                dialect["head"] = head
                holder = arrays if f"{head}.weight" in arrays else others
                for kind, name in zip(("weight", "bias"), self.head, strict=True):
                    arrays[name] = holder.pop(f"{head}.{kind}")
        elif options.head is not None:
            raise ConversionError(f"its head is {self.head[0]}; omit the name of the head")
        other_parts = set()
        for name in others:
            other_set = _longest_prefix(name, prefixes)
            other_parts.add(f"{other_set}*" if other_set else name)
        return KeyMapping(dialect, arrays, [*sorted(skipped), *sorted(other_parts)])

    def _find_head(
        self,
        checkpoint: Checkpoint,
        arrays: Mapping[str, ArrayRef],
        others: Mapping[str, ArrayRef],
        wanted: str | None,
    ) -> str | None:
        """Return the name of a layer that can only be the head: (classes, width) and (classes,), and no other fits.

        Args:
            checkpoint: the open checkpoint.
            arrays: the arrays of the encoder, and what stands beside them.
            others: all other arrays of the file.
            wanted: the name that the caller states.

        Raises:
            ConversionError: there is no layer of the stated name.
        """
        width = checkpoint.shapes[arrays[self.marker].name][0]
        shapes = {}
        for name, stored in {**others, **arrays}.items():
            if name.split(".")[0] not in self.encoder:
                shapes[name] = checkpoint.shapes[stored.name]
        fitting = []
        for name, bias_shape in shapes.items():
            layer = name.removesuffix(".bias")
            if len(bias_shape) == 1 and shapes.get(f"{layer}.weight") == (*bias_shape, width):
                fitting.append(layer)
        if wanted in fitting:
            return wanted
        if wanted is not None:
            found = ", ".join(fitting) or "none"
            raise ConversionError(f"it has no layer {wanted} from {width} channels to classes; found: {found}")
        if len(fitting) != 1:
            return None
        root = fitting[0].split(".")[0]
        siblings = [name for name in shapes if name.split(".")[0] == root]
        if len(siblings) > 2:  # the layer is a part of something larger
            return None
        return fitting[0]

    def canonical(self, name: str) -> str:
        """Return the name in the rules."""
        return name

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, naming: KeyMapping, options: ConvertOptions) -> Fields:
        overrides = options.overrides
        fields = self.sizes(shapes, options.position_grid)
        fields |= self.stated(checkpoint.settings, fields)
        if "hidden_size" in fields and "num_attention_heads" not in {**fields, **overrides}:
            width = fields["hidden_size"].value
            if width not in _HEADS:
                raise ConversionError(
                    f"its width is {width}, which no published model has, and no array shows the number of attention "
                    "heads; set num_attention_heads"
                )
            reason = f"no array shows it; as in published models of width {width}"
            fields = {"num_attention_heads": Inferred(_HEADS[width], reason, is_assumed=True), **fields}
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
    def sizes(self, shapes: Shapes, grid: Grid) -> Fields:
        """Infer the fields of the configuration, each with its reason, except the number of heads."""

    def stated(self, settings: dict[str, Any], found: Fields) -> Fields:
        """Return the fields that the config.json of the weights states, in addition to those found in the arrays."""
        return {}


def _longest_prefix(name: str, prefixes: Iterable[str]) -> str | None:
    return max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)


# By configuration: the bare encoder and the classifier.
MODELS: dict[type, tuple[type[HfVisionPreTrainedModel], type[HfVisionPreTrainedModel]]] = {
    HfViTConfig: (HfViTModel, HfViTForImageClassification),
    HfViTHybridConfig: (HfViTHybridModel, HfViTHybridForImageClassification),
    HfBiTConfig: (HfBiTModel, HfBiTForImageClassification),
}
CONFIGURATIONS = {config_class.model_type: config_class for config_class in MODELS}


def build_config(fields: dict[str, Any]) -> Any:
    """Build a configuration: of a hybrid if `stem_depths` is a field, of a ResNet if `depths` is, else of a ViT."""
    config_class: Any = HfBiTConfig if "depths" in fields else HfViTConfig
    if "stem_depths" in fields:
        config_class = HfViTHybridConfig
    return config_class(**fields)


def has_head(model: HfVisionPreTrainedModel) -> bool:
    """Return whether a model is more than the bare encoder."""
    return model.base_model is not model


def _in_rules(stored: ArrayRef, array: torch.Tensor) -> torch.Tensor:
    """Return an array of a file as the rules expect it, such as that of a single block."""
    return stored.adapt(array if stored.index is None else array[stored.index].clone())


def _convert_arrays(
    rules: list[Rule], checkpoint: Checkpoint, arrays: Mapping[str, ArrayRef]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (our name, parameter) for every rule; each array is read once, and freed after its own rules."""
    problems = []
    for name, its_rules in groupby(rules, key=lambda rule: arrays[rule.theirs].name):
        array = checkpoint.read(name)
        problems += check_values(name, array)
        array = array.float()
        for theirs, ours, layout in its_rules:
            yield ours, layout.to_ours(_in_rules(arrays[theirs], array)).contiguous()
    if problems:
        raise ConversionError("; ".join(problems))


def record_of(model: HfVisionPreTrainedModel) -> dict[str, Any]:
    """Return the record of a converted model, or of the folder that it was loaded from; empty without a record."""
    path = Path(model.name_or_path or "") / CONVERSION_RECORD
    record = model.conversion_record
    if record is None:
        record = read_json_object(path) if model.name_or_path and path.is_file() else {}
    return with_new_keys(record)


def with_reason(values: Mapping[str, Any], reason: str, is_assumed: bool = False) -> Fields:
    """Make fields that share one reason."""
    return {name: Inferred(value, reason, is_assumed) for name, value in values.items()}


def values_of(fields: Mapping[str, Inferred]) -> dict[str, Any]:
    """Return the fields without their reasons."""
    return {name: inferred.value for name, inferred in fields.items()}


def format_size(sizes: Iterable[int]) -> str:
    """Format sizes as text: `16 x 16 x 3 x 768`."""
    return " x ".join(map(str, sizes))


def format_value(value: Any) -> str:
    """Format a value as text: sizes as `20 x 36`."""
    if isinstance(value, tuple):
        return format_size(value)
    return "none" if value is None else str(value)


def one_or_pair(rows: int, columns: int) -> int | tuple[int, int]:
    """Return a size in the form of the configuration: an int if both numbers are equal."""
    return rows if rows == columns else (rows, columns)


_DEFAULT_IMAGE_SIZE = 224  # for a file without a table of positions
UNKNOWN_IMAGE_SIZE = Inferred(_DEFAULT_IMAGE_SIZE, "no array of a ResNet shows it; the usual size", is_assumed=True)


def image_size_of(
    num_patches: int | None, pixels: Sequence[int], grid: tuple[int, int] | None, has_class_position: bool
) -> Inferred:
    """Infer the image size in pixels from a table of positions; one number if height and width are equal.

    Args:
        num_patches: rows of the table for patches; None for a model without a table (assumed: about 224 x 224 pixels).
        pixels: height and width of a patch.
        grid: (rows, columns) that the caller states; a square by default.
        has_class_position: the table has another row for the class token; only for the reason.

    Raises:
        ConversionError: the number of rows does not match the grid, or is not a square.
    """
    if num_patches is None:
        rows, columns = grid or (max(_DEFAULT_IMAGE_SIZE // size, 1) for size in pixels)
        known = "the file has no position embeddings; assumed:"
    elif _fits(num_patches, grid):
        rows, columns = grid or (math.isqrt(num_patches), math.isqrt(num_patches))
        known = f"{num_patches} positions" + (", without the class token's:" if has_class_position else ":")
    else:
        expected = f"{grid[0]} x {grid[1]}, the position_grid" if grid else "a square"
        raise UnknownGridError(
            f"it has position embeddings for {num_patches} patches (expected {expected}); pass their grid as "
            "--position-grid RxC (position_grid=(rows, columns))",
            num_patches,
        )
    reason = f"{known} {rows} x {columns} patches of {format_size(pixels)} pixels"
    reason += ", if the grid is square" if num_patches is not None and grid is None else ""
    return Inferred(one_or_pair(rows * pixels[0], columns * pixels[1]), reason, is_assumed=grid is None)


def no_embed_class_of(num_positions: int, grid: tuple[int, int] | None) -> Inferred:
    """Infer, for a model with a class token, whether only the patches have positions, as in big_vision and DeiT III."""
    if _fits(num_positions, grid):
        return Inferred(True, f"{num_positions} positions, none of them for the class token")
    return Inferred(False, f"{num_positions} positions, the first for the class token")


def _fits(num_patches: int, grid: tuple[int, int] | None) -> bool:
    """Return whether a table of positions has the given grid, or a square grid if none is given."""
    return num_patches == (grid[0] * grid[1] if grid else math.isqrt(num_patches) ** 2)


def apply_overrides(fields: Fields, config: Any, stated: Collection[str]) -> Fields:
    """Return the fields with the values of a configuration in which the caller has changed some.

    If the caller states another image size, the shape of the grid of positions stays an assumption.

    Args:
        fields: the inferred fields.
        config: the configuration.
        stated: names of the fields that the caller states.
    """
    has_table = getattr(config, "position_embedding_type", "none") not in ("sincos2d", "none")
    found = {}
    for name in dict.fromkeys((*fields, *sorted(stated))):
        before = fields.get(name, Inferred(None, "stated"))
        value = getattr(config, name, before.value)
        is_stated = name in stated or ("patch_size" in stated and value != before.value)  # the latter: with the patches
        found[name] = Inferred(value, "stated") if is_stated else before._replace(value=value)
        if name == "image_size" and is_stated and before.is_assumed and has_table and "position_grid" not in fields:
            found["position_grid"] = before._replace(value=getattr(config, "position_grid", None) or "square")
    return found


# Settings of the paper's ablations, which no other format stores.
PAPER_DEFAULTS: dict[str, Any] = {"position_embedding_placement": "input", "attention_axes": "all"}


def unsupported_fields(
    config: HfVisionConfig, choices: Mapping[str, Collection[Any]], fixed: Mapping[str, Any]
) -> list[str]:
    """List the settings of a model that a format cannot store.

    Args:
        config: configuration of the model.
        choices: field -> the values that the format can store.
        fixed: field -> the only value that the format can store.
    """
    supported = {**choices, **{name: (value,) for name, value in fixed.items()}}
    values = {name: getattr(config, name) for name in supported}
    return [
        f"{name}={value!r} (expected {' or '.join(map(repr, supported[name]))})"
        for name, value in values.items()
        if value not in supported[name]
    ]
