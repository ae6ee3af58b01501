"""Sources of the original JAX checkpoints: ViTs and hybrids of vit_jax, present-day Flax and big_vision; and BiT.

The rules are in `tables`, with the names of the released files. This module translates the names of a file to them.

In a released vit_jax file, the modules of a block are numbered by position (LayerNorm_0,
MultiHeadDotProductAttention_1, LayerNorm_2, MlpBlock_3). Present-day Flax (and big_vision) numbers them per class.
If a file also holds a text tower or a language model, the head of the image tower is a projection to an embedding.
"""

import math
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ...catalog import built_in_class_names, evaluation_of, find_released, original_of, released_with
from ...files.npz import write_npz
from ...models.configuration_hf_bit import ORIGINALS, HfBiTConfig
from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, stem_stride
from ...models.image_processing_hf_vit import HfViTImageProcessor
from ...models.sizes import MAX_LAYERS, Size, as_pair
from ..checkpoint import Checkpoint
from ..image_processors import mean_and_std
from ..reading_back import read_npz_back
from ..source import (
    MODELS,
    PAPER_DEFAULTS,
    UNKNOWN_IMAGE_SIZE,
    ArrayRef,
    ConvertOptions,
    Fields,
    Inferred,
    KeyMapping,
    Model,
    RuleSource,
    Shapes,
    format_size,
    has_head,
    image_size_of,
    no_embed_class_of,
    record_of,
    unsupported_fields,
    with_reason,
)
from ..tables import ConversionError, Rule
from ..weight_sets import choose_weights
from .tables import BIT_TABLES, POSITIONS, fingerprint_of, vit_table, with_flat_norms

logger = logging.get_logger(__name__)

_TOWER = "img/"
# "0/": the first entry of the tuple (parameters, optimizer state, step) that vit_jax/train.py saves
_ROOTS = (
    "params/",
    "opt/target/",
    "0/",
    "",
    "ema_params/",
    "params_ema/",
    "ema/",
    "target/",
    "model/",
    "state/params/",
)
_PREFIXES = (*(f"{root}img/" for root in _ROOTS if root != "0/"), *_ROOTS)
_OTHER_TOWERS = {"txt", "t", "llm"}  # other parts of a file with an image tower: text, temperature, language model
_KERNEL = "embedding/kernel"  # of the patches
_BLOCK = "Transformer/encoderblock_0"
_QUERY = f"{_BLOCK}/MultiHeadDotProductAttention_1/query/kernel"
_DENSE = f"{_BLOCK}/MlpBlock_3/Dense_0/kernel"
_STACKED = "Transformer/encoderblock/"  # one array for all blocks, whose first axis is the depth
_MAP_HEAD = "MAPHead_0/"
_INLINED_MAP_HEAD = ("probe", "MlpBlock_0/", "MultiHeadDotProductAttention_0/", "LayerNorm_0/")
_ROOT_POSITIONS = ("pos_embedding", "Transformer/pos_embedding")  # of big_vision
# Modules of a block: number per class -> number by position
_PER_CLASS = {
    "LayerNorm_1": "LayerNorm_2",
    "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1",
    "MlpBlock_0": "MlpBlock_3",
}
_GROUP_NORM = re.compile(r"(^|/)(gn[^/]*|norm-pre-head)/scale$")
# Values of settings that each dialect can store
_RELEASED = {"position_embedding_type": ("learned", "none"), "pooling": ("cls", "mean", "none")}
_BIG_VISION = {"position_embedding_type": ("learned", "sincos2d")}
_CHOICES = {"vit_jax": _RELEASED, "flax": _RELEASED, "big_vision": _BIG_VISION}
# Settings of which the dialects can store one value
_FIXED = PAPER_DEFAULTS | {"qkv_bias": True, "norm_after_pooling": False}
# FlexiViT (arXiv 2212.08013): folder of the released files, and of a training run; its stored sizes and image size
_FLEXIVIT = "big_vision/flexivit/"
_FLEXIVIT_KERNEL, _FLEXIVIT_GRID, _FLEXIVIT_IMAGE_SIZE = (32, 32), (7, 7), 240
_RGB = 3


class JaxSource(RuleSource):
    """A format of the original code."""

    format = "jax"

    @abstractmethod
    def numbers(self, config: Any) -> dict[str, Any]:
        """Return the values of the settings that a file does not store: the original code has no others."""

    def arrays(self, model: Model, dialect: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return name in the rules -> view of our parameter, and an untrained head that was dropped.

        Args:
            model: the model.
            dialect: description of the dialect, see `KeyMapping`.
        """
        parameters, rules = model.state_dict(), self.rules(model)
        if dialect.get("flat_group_norm"):
            rules = with_flat_norms(rules)
        arrays = {theirs: layout.to_theirs(parameters[ours]) for theirs, ours, layout in rules}
        dropped = record_of(model).get("dropped", {}).get("head")
        if dropped and not has_head(model):
            weight, bias = self.head
            arrays[weight] = torch.zeros(dropped["shape"], dtype=model.dtype)
            arrays[bias] = torch.full(dropped["shape"][-1:], dropped["bias"], dtype=model.dtype)
        return arrays

    def original(self, model: Model) -> str | None:
        """Return the address of the released file whose weights a model still has; None if there is none.

        A copy in another format has other definitions (GELU, epsilons), but is the same file in this one.
        """
        record = record_of(model)
        address = original_of(str(record.get("source"))) or released_with(str(record.get("fingerprint")))
        parameters = model.state_dict()
        is_same = address and fingerprint_of(model.config, parameters, parameters.__getitem__) == record["fingerprint"]
        return address if is_same else None

    def write(self, model: Model, path: Path, dialect: str, processor: Any) -> Any:
        if unsupported_fields(model.config, {}, self.numbers(model.config)):
            logger.warning(f"Written as {self.original(model)}, which the original code computes with other numbers.")
        for name in ("pooling", "position_embedding_type"):
            if getattr(model.config, name, "") == "none":
                logger.warning(f"An .npz does not state {name} none; read it with --set {name}=none")
        if isinstance(processor, HfViTImageProcessor):
            _name_other_pixels(processor, model.config.num_channels)
        arrays = self.arrays(model, {**record_of(model).get("dialect", {}), "names": dialect})
        arrays = {_name_in(dialect, name): array for name, array in arrays.items()}
        write_npz(path, arrays.items())
        read_npz_back(path, arrays)

    def labels(self, checkpoint: Checkpoint, num_labels: int) -> list[str] | None:
        """Return the class names of a released file, by its address; None for any other file."""
        entry = find_released(checkpoint.location) if "://" in checkpoint.location else None
        names = built_in_class_names("imagenet1k") if entry and entry.facts.get("labels") == "imagenet1k" else []
        return names if len(names) == num_labels else None


def _name_other_pixels(processor: HfViTImageProcessor, num_channels: int) -> None:
    """Log a warning if pixel values are not in [-1, 1], as every reader of an .npz expects."""
    normalization = mean_and_std(processor.settings(), num_channels)
    if any(abs(value - 0.5) > 1e-6 for values in normalization.values() for value in values):
        logger.warning(
            "Readers of an .npz expect pixel values in [-1, 1]; this model's have the mean {mean} and the standard "
            "deviation {std}, which the file does not state".format(**normalization)
        )


class Jax(JaxSource):
    """The original's ViTs and hybrids; all sizes are read from the arrays."""

    models = MODELS[HfViTConfig]
    dialects = tuple(_CHOICES)
    head = ("head/kernel", "head/bias")
    table = staticmethod(vit_table)  # pyright: ignore[reportAssignmentType]

    def naming(self, checkpoint: Checkpoint, options: ConvertOptions) -> KeyMapping | None:
        prefixes = [prefix for prefix in _PREFIXES if prefix + _KERNEL in checkpoint.shapes]
        towers = [prefix for prefix in prefixes if prefix.endswith(_TOWER)]
        if not prefixes:
            return None
        prefix = choose_weights(towers or prefixes, options.weight_set, checkpoint.path.name)
        own = {name.removeprefix(prefix): shape for name, shape in checkpoint.shapes.items() if name.startswith(prefix)}
        arrays = _arrays_in(own, prefix)
        dialect = _describe(_dialect_of(own), prefix, checkpoint, arrays)
        if len(checkpoint.shapes[prefix + _KERNEL]) == 2:  # a matrix: patches are vectors (SigLIP 2 NaFlex)
            dialect["patch_vectors"] = True
            arrays = _as_convolution(checkpoint, arrays)
        root = prefix.removesuffix(_TOWER)
        others = {name.removeprefix(root).split("/")[0] for name in checkpoint.shapes if not name.startswith(prefix)}
        if root == prefix:
            return KeyMapping(dialect, arrays, sorted(others))
        if _OTHER_TOWERS & others:
            arrays = {re.sub("^head/", "projection/", name): stored for name, stored in arrays.items()}
        return KeyMapping(dialect, arrays, sorted(others), _similarity(checkpoint, root))

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, naming: KeyMapping, options: ConvertOptions) -> Fields:
        stem: Fields = {}
        if "conv_root/kernel" in shapes:
            depths = shapes.stages(r"block(\d+)/unit(\d+)/", first=1)
            stem = {"stem_depths": depths, **shapes.sizes("conv_root/kernel", stem_width=3, num_channels=2)}
        fields: Fields = {
            "patch_size": shapes.patch_size(_KERNEL, rows=0),
            **shapes.sizes(_KERNEL, num_channels=2, hidden_size=3),
            "num_hidden_layers": shapes.layers(r"Transformer/encoderblock_(\d+)/"),
            **shapes.sizes(_QUERY, num_attention_heads=1),
            **shapes.sizes(_DENSE, intermediate_size=1),
            "pooling": _pooling(shapes, naming.other_parts),
            "use_cls_token": shapes.has("cls"),
            "representation_size": Inferred(None, "there is no pre_logits/kernel"),
            **shapes.sizes("pre_logits/kernel", optional=True, representation_size=1),
        }
        grid = options.position_grid
        if "patch_vectors" in naming.dialect:
            fields["position_interpolation"] = Inferred("bilinear", "patches are vectors, as in NaFlex")
            if grid is None and POSITIONS in shapes:
                grid = as_pair(checkpoint.shapes[naming.arrays[POSITIONS].name][:2])
        fields |= shapes.sizes("head/kernel", optional=True, num_labels=1)
        fields |= shapes.sizes("projection/kernel", optional=True, projection_dim=1)
        fields |= stem
        stride = stem_stride(stem["stem_depths"].value) if stem else 1
        pixels = [size * stride for size in shapes[_KERNEL][:2]]
        has_cls = "cls" in shapes
        if POSITIONS not in shapes:
            reason = "there is no table of positions; big_vision then computes them"
            fields["position_embedding_type"] = Inferred("sincos2d", reason, is_assumed=True)
            return {**fields, "image_size": image_size_of(None, pixels, grid, False)}
        num_positions = shapes[POSITIONS][1]
        has_class_position = has_cls
        if has_cls and naming.dialect["names"] == "big_vision":
            fields["no_embed_class"] = no_embed_class_of(num_positions, grid)
            has_class_position = not fields["no_embed_class"].value
        image_size = image_size_of(num_positions - has_class_position, pixels, grid, has_class_position)
        released = find_released(checkpoint.location)
        if released is not None and image_size.value == released.facts.get("resolution"):
            image_size = Inferred(image_size.value, "that of the released file of this name")
        reason = f"there is a table of positions, {format_size(shapes[POSITIONS])}"
        fields |= {"position_embedding_type": Inferred("learned", reason), "image_size": image_size}
        if naming.dialect["names"] == "big_vision" and not stem:
            fields |= _flexible_fields(fields, checkpoint.location, options.patch_size)
        return fields

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        location = checkpoint.location
        if dialect.get("patch_vectors"):
            settings = {"preset": "native", "jpeg_dct": "fast"}
            return Inferred(settings, "patches are vectors, as in NaFlex, which keeps the aspect ratio")
        if dialect["prefix"].endswith(_TOWER):
            return _evaluated_as({"preset": "lit"}, "image towers", location)
        known = evaluation_of(location)
        if "patch_size" in known or known["processor"].get("preset") == "augreg":
            return Inferred(known["processor"], "the name or address of the file is FlexiViT's or AugReg's")
        code = "big_vision" if dialect["names"] == "big_vision" else "vit_jax"
        return _evaluated_as({"preset": code}, f"files of {code}", location)

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        fixed = dict(_FIXED)
        if dialect == "big_vision":
            fixed["model_type"] = HfViTConfig.model_type
        else:
            fixed |= {"stored_patch_size": None, "no_embed_class": False}
        if config.use_cls_token and config.pooling in ("mean", "map"):
            fixed["use_cls_token"] = False  # the originals have a class token with the pooling "cls" or "none" only
        found = unsupported_fields(config, _CHOICES[dialect], fixed)
        numbers = self.numbers(config)
        others = unsupported_fields(config, {}, numbers)
        if others and self.original(model) is None:
            options = " ".join(f"--set {name}={value}" for name, value in numbers.items())
            found.append(
                f"{', '.join(others)}; if the weights are a copy of an original file, convert them with {options} and "
                "export that folder"
            )
        return found

    def numbers(self, config: Any) -> dict[str, Any]:
        numbers = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
        if isinstance(config, HfViTHybridConfig):
            numbers |= {name: value for name, value in ORIGINALS["bit"].items() if "eps" in name or "form" in name}
        return numbers

    def arrays(self, model: Model, dialect: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the arrays; big_vision has no position of the class token, so it is added to the token itself."""
        arrays = super().arrays(model, dialect)
        positions = arrays.get(POSITIONS)  # (1, num_prefix_positions + patches, hidden_size)
        if positions is not None and model.config.num_prefix_positions and dialect["names"] == "big_vision":
            arrays["cls"] = arrays["cls"] + positions[:, :1]
            positions = positions[:, 1:]
        if dialect.get("patch_vectors"):
            arrays[_KERNEL] = arrays[_KERNEL].flatten(0, 2)
            if positions is not None:
                positions = positions[0].unflatten(0, model.config.stored_grid)
        if positions is not None:
            arrays[POSITIONS] = positions
        return arrays


def _dialect_of(names: Collection[str]) -> str:
    """Return the dialect of the names below the prefix.

    It is "vit_jax" (released), "flax" (present-day numbering) or "big_vision" (as flax, with positions at the root).
    """
    per_class = any(re.match(r"Transformer/encoderblock(_\d+)?/MlpBlock_0/", name) for name in names)
    of_big_vision = (*_ROOT_POSITIONS, f"{_MAP_HEAD}probe", "probe", _STACKED)
    if any(name.startswith(of_big_vision) for name in names) or (per_class and POSITIONS not in names):
        return "big_vision"
    return "flax" if per_class else "vit_jax"


def _arrays_in(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> dict[str, ArrayRef]:
    """Return name in the rules -> array, of the arrays below a prefix."""
    arrays = {}
    for own, shape in shapes.items():
        name = _name_in_rules(own)
        if name.startswith(_STACKED):
            for index in range(min(shape[0], MAX_LAYERS + 1)):  # the configuration refuses more
                arrays[name.replace("block/", f"block_{index}/", 1)] = ArrayRef(prefix + own, index)
        else:
            arrays[name] = ArrayRef(prefix + own)
    return arrays


def _name_in_rules(name: str) -> str:
    """Return the name in the rules, that of the released files, for an array of any dialect."""
    if name in _ROOT_POSITIONS:
        return POSITIONS
    if name.startswith(_INLINED_MAP_HEAD):
        return _MAP_HEAD + name
    if name.startswith("Transformer/encoderblock"):
        for per_class, released in _PER_CLASS.items():
            name = name.replace(f"/{per_class}/", f"/{released}/")
    return name


def _name_in(dialect: str, name: str) -> str:
    """Return a dialect's name for an array of the rules."""
    name = re.sub("^projection/", "head/", name)
    if dialect == "big_vision" and name == POSITIONS:
        return "pos_embedding"
    if dialect != "vit_jax" and name.startswith("Transformer/encoderblock"):
        for per_class, released in _PER_CLASS.items():
            name = name.replace(f"/{released}/", f"/{per_class}/")
    return name


def _pooling(shapes: Shapes, other_parts: Collection[str]) -> Inferred:
    """Infer the pooling; a language model uses every token (PaliGemma)."""
    if "MAPHead_0/probe" in shapes:
        return Inferred("map", "there is a MAP head")
    if "cls" in shapes:
        return Inferred("cls", "there is an array cls, and no MAP head")
    if "llm" in other_parts:
        return Inferred("none", "the file also holds a language model, which uses every token")
    return Inferred("mean", "there is no array cls, and no MAP head")


def _evaluated_as(settings: dict[str, Any], kind: str, location: str) -> Inferred:
    """Infer the usual preprocessing of a kind of file: known for a released file (by its name), else assumed."""
    if find_released(location) is not None:
        return Inferred(settings, "evaluation of the released file of this name")
    return Inferred(settings, f"no array shows it; evaluation of released {kind}", is_assumed=True)


def _similarity(checkpoint: Checkpoint, root: str) -> dict[str, float]:
    """Read temperature `t` (a logarithm) and bias `b` of the similarity of two towers, if the file holds them."""
    stored = {name: root + name for name in ("t", "b") if math.prod(checkpoint.shapes.get(root + name, (0,))) == 1}
    numbers = {name: float(checkpoint.read(array)) for name, array in stored.items()}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _describe(names: str, prefix: str, checkpoint: Checkpoint, arrays: Mapping[str, ArrayRef]) -> dict[str, Any]:
    """Describe a dialect for the record: all that an export restores."""
    is_stacked = any(stored.index is not None for stored in arrays.values())
    dialect: dict[str, Any] = {"names": names, "prefix": prefix, "stacked": is_stacked}
    norms = [stored.name for name, stored in arrays.items() if _GROUP_NORM.search(name)]
    if any(len(checkpoint.shapes[name]) == 1 for name in norms):  # released files have (1, 1, 1, channels)
        dialect["flat_group_norm"] = True
    return dialect


def _flexible_fields(fields: Mapping[str, Inferred], location: str, patch_size: Size | None) -> Fields:
    """Infer the configuration fields that make a model flexible; return an empty dictionary for any other model.

    Only the name of a released file shows that a model is flexible. Another file with FlexiViT's sizes may also be a
    ViT-B/32 for 224 pixels, so the caller must pass the patch size.

    Args:
        fields: inferred fields, with the kernel's size as the patch size.
        location: path or address of the file.
        patch_size: patch size that the caller states.

    Raises:
        ConversionError: the patch size is ambiguous, and the caller has not stated it.
    """
    kernel, pixels = as_pair(fields["patch_size"].value), as_pair(fields["image_size"].value)
    grid = (pixels[0] // kernel[0], pixels[1] // kernel[1])
    known = evaluation_of(location)
    is_named = "patch_size" in known
    if not is_named:
        has_its_buffers = (kernel, grid) == (_FLEXIVIT_KERNEL, _FLEXIVIT_GRID) and fields["pooling"].value == "mean"
        if not has_its_buffers and _FLEXIVIT not in location:
            return {}
        if patch_size is None:
            raise ConversionError(
                f"its stored sizes are FlexiViT's ({format_size(kernel)} kernel, {format_size(grid)} positions), "
                "without a patch size; pass patch_size=16 (any from 8 to 48) for a FlexiViT at "
                f"{_FLEXIVIT_IMAGE_SIZE} pixels, patch_size={kernel[0]} for a ViT with patches of {kernel[0]}"
            )
        known = {"patch_size": patch_size, "image_size": _FLEXIVIT_IMAGE_SIZE}
    reason = "the name of the file is FlexiViT's" if is_named else "its stored sizes are FlexiViT's"
    return {
        "stored_patch_size": fields["patch_size"],
        "position_grid": Inferred(grid, reason) if is_named else fields["image_size"]._replace(value=grid),
        "patch_size": Inferred(known["patch_size"], reason),
        "image_size": Inferred(known["image_size"], reason, is_assumed=not is_named),
        # half-pixel centers, antialiased: jax.image.resize(..., "linear")
        "position_interpolation": Inferred("bilinear", "as in FlexiViT"),
    }


def _as_convolution(checkpoint: Checkpoint, arrays: dict[str, ArrayRef]) -> dict[str, ArrayRef]:
    """Give NaFlex's arrays the shapes of the rules; the values of a patch are ordered row, column, channel.

    Raises:
        ConversionError: a patch is not a square with three channels.
    """
    values, hidden_size = checkpoint.shapes[arrays[_KERNEL].name]
    side = math.isqrt(values // _RGB)
    if side * side * _RGB != values:
        raise ConversionError(f"its patches have {values} values (expected a square with {_RGB} channels)")
    changed = {_KERNEL: arrays[_KERNEL]._replace(adapt=lambda kernel: kernel.reshape(side, side, _RGB, hidden_size))}
    if POSITIONS in arrays:
        changed[POSITIONS] = arrays[POSITIONS]._replace(adapt=lambda positions: positions.flatten(0, 1)[None])
    return arrays | changed


class JaxBiT(JaxSource):
    """BiT's checkpoints: big_transfer's released files, and those of big_vision's bit_paper.py and bit.py.

    A code is recognized by the name of the root convolution. The ResNet of a hybrid also has the names of bit.py;
    `Jax` reads hybrids.

    Args:
        code: a key of `BIT_TABLES` and of `ORIGINALS`.
    """

    models = MODELS[HfBiTConfig]

    def __init__(self, code: str):
        self.code, self.rows = code, BIT_TABLES[code]
        self.is_released = code == "big_transfer"  # names of released files determine preprocessing and image size
        self.dialects = ("big_transfer" if self.is_released else "big_vision",)
        self.root, self.head = self.rows[0].theirs, (self.rows[-2].theirs, self.rows[-1].theirs)

    def naming(self, checkpoint: Checkpoint, options: ConvertOptions) -> KeyMapping | None:
        """Return the naming; numbers of convolutions in some files of big_transfer (`..._conv2d_17`) are ignored."""
        for prefix in _PREFIXES:
            own = {name.removeprefix(prefix): name for name in checkpoint.shapes if name.startswith(prefix)}
            arrays = {re.sub(r"(?<=/standardized_conv2d)_\d+(?=/)", "", name): ArrayRef(own[name]) for name in own}
            if self.root in arrays:
                others = {name.split("/")[0] for name in checkpoint.shapes if not name.startswith(prefix)}
                return KeyMapping(_describe(self.code, prefix, checkpoint, arrays), arrays, sorted(others))
        return None

    def infer(self, shapes: Shapes, checkpoint: Checkpoint, naming: KeyMapping, options: ConvertOptions) -> Fields:
        image_size = UNKNOWN_IMAGE_SIZE
        if self.is_released:
            known = evaluation_of(checkpoint.location).get("image_size", image_size.value)
            image_size = image_size._replace(value=known)
            if find_released(checkpoint.location) is not None:
                image_size = Inferred(image_size.value, "evaluation of the released file of this name")
        fields = {
            **shapes.sizes(self.root, num_channels=2, embedding_size=3),
            "depths": shapes.stages(r"(?:resnet/)?block(\d+)/unit(\d+)/", first=1),
            **with_reason(ORIGINALS[self.code], f"as in the code of {self.code}"),
            "image_size": image_size,
        }
        return fields | shapes.sizes(self.head[0], optional=True, num_labels=-1)

    def table(self, config: HfBiTConfig) -> list[Rule]:
        return self.rows

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        known = evaluation_of(checkpoint.location)["processor"] or {"preset": "bit"}
        settings = known if self.is_released else {"preset": "big_vision"}
        return _evaluated_as(settings, f"files of {self.dialects[0]}", checkpoint.location)

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        problems = unsupported_fields(model.config, {}, self.numbers(model.config) | {"spatial_mixing": "convolution"})
        return [] if problems and self.is_released and self.original(model) else problems

    def numbers(self, config: Any) -> dict[str, Any]:
        return ORIGINALS[self.code]
