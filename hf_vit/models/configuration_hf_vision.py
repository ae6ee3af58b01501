"""Base of all configurations: sizes, limits, input checks, and reading of a config.json.

A value of a wrong type or beyond its limit is refused in one sentence, before anything is built.
"""

import copy
import math
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import torch
from huggingface_hub.dataclasses import strict as hub_strict
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from .utils import (
    OutdatesManifest,
    Size,
    absence_explained,
    allowed,
    check_place,
    closest,
    describe_unknown,
    read_json_object,
    refuse_arguments,
)
from .utils import (
    as_pair as as_pair,
)
from .utils import (
    refuse_unknown as refuse_unknown,
)

logger = logging.get_logger(__name__)

# Arguments that transformers passes to a configuration besides its fields.
_KNOWN_EXTRAS = frozenset(
    "_attn_implementation _commit_hash _name_or_path attn_implementation auto_map experts_implementation model_type "
    "name_or_path num_labels output_attentions quantization_config tie_last_hidden_states tie_word_embeddings "
    "torch_dtype use_cache".split()
)
# Arguments of `from_pretrained` that locate a config.json.
_WHERE = (
    "cache_dir force_download local_files_only proxies revision subfolder token trust_remote_code _from_auto "
    "_from_pipeline".split()
)
# Arguments of `from_pretrained` that a configuration does not use.
_OF_LOADING = frozenset("adapter_kwargs code_revision gguf_file quantization_config user_agent".split())
# Names that a config.json may give. Any other would be downloaded from the Hub, as a repository of kernels.
ATTENTION_IMPLEMENTATIONS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
_KEPT = "_kept_fields"  # unknown fields of a config.json


def is_same_grid(grid: Sequence[int], other: Sequence[int]) -> bool:
    """Tell whether two grids are equal; False for the symbolic sizes of an export, which stand for any size."""
    return all(isinstance(size, int) for size in (*grid, *other)) and tuple(grid) == tuple(other)


def score_function(config: PreTrainedConfig) -> Literal["softmax", "sigmoid", "none"]:
    """Return the function that converts a classifier's logits to scores; "none" for a regression.

    It depends on `problem_type` as in transformers' ImageClassificationPipeline.
    """
    if config.problem_type == "regression":
        return "none"
    is_sigmoid = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return "sigmoid" if is_sigmoid else "softmax"


def scores_of(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Convert logits (..., num_labels) to scores of the same shape, in float32; see `score_function`."""
    logits, function = logits.float(), score_function(config)
    if function == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(dim=-1) if function == "softmax" else logits


class HfVisionConfig(OutdatesManifest, BackboneConfigMixin, PreTrainedConfig):
    """Base of the configurations; a subclass is `@strict` and declares `num_channels` and `image_size`."""

    num_channels: int = 3
    image_size: Size = 224
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    if TYPE_CHECKING:
        num_labels: int = 2  # transformers declares it as optional

    def __post_init__(self, **kwargs: Any):
        out_features, out_indices = kwargs.pop("out_features", None), kwargs.pop("out_indices", None)
        kept, self._kept_fields = kwargs.pop(_KEPT, {}), {}
        refuse_arguments(type(self).__name__, kwargs.keys() - _KNOWN_EXTRAS, self.argument_names())
        check_general(kwargs, self)
        self.validate_architecture()  # before anything is made of these numbers
        super().__post_init__(**kwargs)
        self.set_output_features_output_indices(out_features=out_features, out_indices=out_indices)
        self._kept_fields = kept  # last, so that nothing above reads them

    @classmethod
    def argument_names(cls) -> set[str]:
        """Return the names of all arguments of the constructor."""
        return {field.name for field in fields(cls)} | _KNOWN_EXTRAS | {"out_features", "out_indices"}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a configuration, as in transformers, but refuse unknown arguments.

        Raises:
            ValueError: an argument is unknown; the message names it.
        """
        wants_unused, is_auto = kwargs.pop("return_unused_kwargs", False), kwargs.get("_from_auto", False)
        config, unused = super().from_pretrained(
            pretrained_model_name_or_path, *args, return_unused_kwargs=True, **kwargs
        )
        if wants_unused:
            return config, unused
        _refuse_left_over(cls, unused, only_alike=is_auto)
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration, as in transformers; unknown fields of a config.json are kept, with a warning.

        Raises:
            ValueError: an argument looks like a misspelt field.
        """
        folder = kwargs.pop("_folder", kwargs.get("name_or_path", config_dict.get("_name_or_path")))
        wants_unused, known = kwargs.pop("return_unused_kwargs", False), cls.argument_names()
        unknown = {name: value for name, value in config_dict.items() if name not in known}
        if unknown:
            where = f"the config.json of {folder}" if folder else "a configuration"
            logger.warning_once(
                f"{where} has {describe_unknown(unknown)}, which {cls.__name__} does not know: kept, not used"
            )
        for name in ("attn_implementation", "_attn_implementation"):
            check_attention(config_dict.get(name))
        settings = {name: value for name, value in config_dict.items() if name in known} | {_KEPT: unknown}
        config, unused = super().from_dict(settings, return_unused_kwargs=True, **kwargs)
        if wants_unused:
            return config, unused
        _refuse_left_over(cls, unused, only_alike=True)
        return config

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike) -> Any:
        """Read a configuration from a file, with `from_dict`."""
        return cls.from_dict(cls._dict_from_json_file(json_file))

    if not TYPE_CHECKING:  # or every attribute would have a type

        def __getattr__(self, name):
            """Return a kept field, where there is no attribute of this name."""
            kept = {} if name.startswith("_") else vars(self).get(_KEPT, {})
            if name not in kept:
                # without `name=` and `obj=`, which torch.compile cannot follow
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return kept[name]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, kept ones included."""
        output = super().to_dict()
        output.pop(_KEPT, None)
        return copy.deepcopy(self._kept_fields) | output

    def dict_dtype_to_str(self, d: dict[str, Any]) -> None:
        """Replace dtypes by their names, as in transformers, but not inside kept fields."""
        kept = {_KEPT, *self._kept_fields}  # once: an attribute of a configuration is slow, and d may be 1,000 labels
        ours = {name: value for name, value in d.items() if name not in kept}
        super().dict_dtype_to_str(ours)
        d |= ours

    # transformers would read kept fields of language models in these methods; a vision model has none.

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> Any:
        """Return the configuration itself."""
        return self

    def validate_layer_type(self) -> None:
        """Check nothing."""

    def validate_rope(self) -> None:
        """Check nothing."""

    def _get_generation_parameters(self) -> dict[str, Any]:
        return {}

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the settings of a config.json.

        Args:
            stored_settings: content of the config.json, if it has been read already.

        Raises:
            ValueError: it is of another model; the message says how to load that.
        """
        settings = kwargs.pop("stored_settings", None)
        if settings is None:
            where = {name: value for name, value in kwargs.items() if name in _WHERE}
            settings = read_settings(pretrained_model_name_or_path, **where)
        kwargs = {name: value for name, value in kwargs.items() if name not in _WHERE}
        cls.check_model_type(settings, str(pretrained_model_name_or_path))
        return settings, {**kwargs, "_folder": str(pretrained_model_name_or_path)}

    @classmethod
    def check_model_type(cls, settings: dict[str, Any], folder: str) -> None:
        """Raise ValueError, which says how to load it, if a config.json is of another model than this class's."""
        stored = settings.get("model_type")
        if stored == cls.model_type:
            return
        call = f"hf_vit.load({folder!r}), or `hf-vit convert {folder} OUTPUT`"
        if str(stored).startswith("hf_"):
            call = f"{saved_class(settings) or 'AutoModel'} or hf_vit.load"
        raise ValueError(f"{folder} holds a model of type {stored} (expected {cls.model_type}); use {call}")

    def validate_architecture(self) -> None:
        """Check the fields. `@strict` calls this after construction; the model does again, as fields can change."""

    def check_images(self, shape: Sequence[int]) -> None:
        """Raise ValueError unless a tensor's shape is (batch, num_channels, height, width)."""
        if len(shape) != 4 or shape[1] != self.num_channels:
            raise ValueError(
                f"pixel_values has shape {tuple(shape)}; expected (batch, {self.num_channels}, height, width)"
            )


def saved_class(settings: dict[str, Any]) -> str | None:
    """Return the name of the class for a config.json; a hybrid is not of the plain class that it may be saved as."""
    name = next(iter(settings.get("architectures") or ()), None)
    if name is None or settings.get("model_type") != "hf_vit_hybrid":
        return name
    return re.sub("^HfViT(?!Hybrid)", "HfViTHybrid", name)


def _refuse_left_over(config_class: type[HfVisionConfig], names: Iterable[str], only_alike: bool) -> None:
    """Refuse arguments of `from_pretrained` that are neither fields nor options of loading.

    Args:
        only_alike: refuse only those that resemble a field. Others may be for the image processor of an Auto class.
    """
    known = config_class.argument_names()
    unknown = [name for name in names if not name.startswith("_") and name not in _OF_LOADING]
    unknown = [name for name in unknown if closest(name, known, 0.7) or not only_alike]
    refuse_arguments(config_class.__name__, unknown, known)


Config = TypeVar("Config", bound=type)

# Upper limits. For comparison: ViT-G/14, the largest of the family, has 1.8 billion parameters, 48 layers and 1,664
# channels; an image of 8,000 x 6,000 pixels has 187,500 patches of 16; ImageNet-21k has 21,843 classes.
_MAX_PARAMETERS = 10_000_000_000
MAX_LAYERS = 1_000
MAX_WIDTH = 2**17  # channels anywhere
MAX_STAGES = 8  # of a ResNet
MAX_LABELS = 2**18
MAX_PIXELS = 2**28  # of an image
MAX_TOKENS = 2**20  # patches of an image


class ConfigurationError(StrictDataclassFieldValidationError, ValueError):
    """Invalid configuration: a value of a wrong type, or one that contradicts another."""

    def __init__(self, sentence: str):
        ValueError.__init__(self, sentence)


def strict(config_class: Config) -> Config:
    """Apply huggingface_hub's `@strict`; its errors become `ConfigurationError`, a ValueError."""
    checked: Any = hub_strict(config_class)
    initialize, assign = checked.__init__, checked.__setattr__

    @wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            initialize(self, *args, **kwargs)
        except StrictDataclassClassValidationError as error:
            raise ConfigurationError(str(error.__cause__)) from error

    @wraps(assign)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        try:
            assign(self, name, value)
        except ConfigurationError:
            raise
        except StrictDataclassFieldValidationError as error:
            expected = _describe(checked.__dataclass_fields__[name].type)
            raise ConfigurationError(f"{name} is {reprlib.repr(value)}; expected {expected}") from error

    checked.__init__, checked.__setattr__ = __init__, __setattr__
    return checked


def _describe(kind: Any) -> str:
    """The type of a field in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


class _Reader(PreTrainedConfig):
    """Reader of any config.json, local or on the Hub, within the limits of `read_json_object`."""

    @classmethod
    def _dict_from_json_file(cls, json_file: str | os.PathLike) -> dict[str, Any]:
        return read_json_object(json_file)


def read_settings(name: str | os.PathLike, **where: Any) -> dict[str, Any]:
    """Read the config.json of a folder, or of a name on the Hub.

    Args:
        where: arguments of `from_pretrained` that locate it, such as `revision`.

    Raises:
        ValueError: it is damaged, too large, nested too deeply, or its `model_type` or `architectures` are not text.
        OSError: it does not exist, or cannot be read.
    """
    check_place(name, where.get("subfolder"))
    with wrong_types_refused(f"the config.json of {name}"), absence_explained(name):
        settings, _ = _Reader.get_config_dict(name, **where)
        model_type, architectures = settings.get("model_type"), settings.get("architectures")
    if not isinstance(model_type, str | None):
        raise ValueError(f"the config.json of {name} has the model_type {reprlib.repr(model_type)}; expected text")
    names = architectures or []
    if not isinstance(names, list) or not all(isinstance(entry, str) for entry in names):
        raise ValueError(f"the config.json of {name} has the architectures {reprlib.repr(names)}; expected names")
    return settings


@contextmanager
def wrong_types_refused(what: str) -> Iterator[None]:
    """Turn Python's errors about a value of a wrong type into one sentence.

    Only for blocks that do no more than read and compare values of a JSON file.

    Args:
        what: name of the file, which begins the message.

    Raises:
        ValueError: a value has a wrong type.
    """
    try:
        yield
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise ValueError(f"{what} has values of a wrong type ({reason})") from error


def check_attention(name: Any) -> None:
    """Raise ValueError for an attention implementation that a file may not choose, such as a repository of kernels."""
    if name is not None and name not in ATTENTION_IMPLEMENTATIONS:
        known = ", ".join(ATTENTION_IMPLEMENTATIONS)
        raise ValueError(
            f"attn_implementation is {reprlib.repr(name)} in the config.json (expected one of {known}); "
            "pass another one as an argument of from_pretrained"
        )


def check_general(settings: dict[str, Any], fields: Any) -> None:
    """Check the general settings, which transformers does not check.

    Args:
        settings: the arguments besides the fields.
        fields: the configuration, with its fields assigned.

    Raises:
        ValueError: a value of a wrong type, or beyond its limit.
    """
    count = settings.get("num_labels")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_LABELS):
        raise ValueError(f"num_labels is {reprlib.repr(count)}; it must be an int from 0 to {MAX_LABELS:,}")
    for name in ("dtype", "torch_dtype"):
        value = settings.get(name, vars(fields).get(name))  # transformers warns of the attribute torch_dtype
        if isinstance(value, torch.dtype) or value is None:
            continue
        if not isinstance(value, str) or not isinstance(getattr(torch, value, None), torch.dtype):
            raise ValueError(f"{name} is {reprlib.repr(value)}; it must be a dtype of torch, such as float32")
    for name in ("auto_map", "quantization_config"):
        value = settings.get(name)
        if value is not None and not (isinstance(value, dict) or hasattr(value, "to_dict")):
            raise ValueError(f"{name} is {reprlib.repr(value)}; it must be a JSON object (a dict)")
    _check_labels(fields.id2label)
    numbers = fields.label2id or {}
    if not isinstance(numbers, dict) or not all(str(number).isdecimal() for number in numbers.values()):
        raise ValueError(f"label2id is {reprlib.repr(numbers)}; it must map class names to numbers")


def _check_labels(id2label: Any) -> None:
    """Check that `id2label` maps 0, 1, 2, ... to text."""
    if id2label is None:
        return
    if not isinstance(id2label, dict):
        raise ValueError(f"id2label is {reprlib.repr(id2label)}; it must map class numbers to names")
    numbers = {int(key) if str(key).isdecimal() and len(str(key)) < 10 else None for key in id2label}
    if numbers != set(range(len(id2label))) or len(id2label) > MAX_LABELS:
        raise ValueError(
            f"id2label has the class numbers {reprlib.repr(list(id2label))}; they must be 0 to {len(id2label) - 1}"
        )
    for number, name in id2label.items():
        if not isinstance(name, str):
            raise ValueError(f"the name of class {number} in id2label is {reprlib.repr(name)}; it must be text")


def check_sizes(config: Any, *names: str) -> None:
    """Raise ValueError for the first of the named fields that is not a size, see `check_size`; None is allowed."""
    for name in names:
        if getattr(config, name) is not None:
            check_size(name, getattr(config, name))


def check_size(name: str, size: Size) -> None:
    """Raise ValueError unless a size is an int or (height, width), at least 1 and at most `MAX_PIXELS` in area."""
    sides = (size, size) if isinstance(size, int) else size
    are_two = isinstance(sides, list | tuple) and len(sides) == 2
    if not are_two or any(not isinstance(side, int) or side < 1 for side in sides):
        raise ValueError(f"{name} is {reprlib.repr(size)}; it must be an int or (height, width), at least 1")
    if sides[0] * sides[1] > MAX_PIXELS:
        raise ValueError(f"{name} is {reprlib.repr(size)}; it must be at most {MAX_PIXELS:,} pixels")


def check_counts(config: Any, highest: int, *names: str) -> None:
    """Raise ValueError for the first of the named fields that is not between 1 and `highest`; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 1 <= value <= highest:
            raise ValueError(f"{name} is {reprlib.repr(value)}; it must be at least 1 and at most {highest:,}")


def check_amounts(config: Any, *names: str) -> None:
    """Raise ValueError for the first of the named fields that is not a finite number of at least 0."""
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 0 and finite")


def check_depths(config: Any, name: str) -> None:
    """Raise ValueError where a ResNet has more than `MAX_STAGES` stages or `MAX_LAYERS` units."""
    depths = getattr(config, name)
    if len(depths) > MAX_STAGES or sum(depths) > MAX_LAYERS:
        raise ValueError(
            f"{name} is {reprlib.repr(list(depths))}; at most {MAX_STAGES} stages and {MAX_LAYERS:,} units are built"
        )


def check_parameters(count: int) -> None:
    """Raise ValueError where a model would have more than `_MAX_PARAMETERS` parameters."""
    if count > _MAX_PARAMETERS and not allowed("large"):
        raise ValueError(
            f"these settings make a model of about {reprlib.repr(count)} parameters; "
            f"at most {_MAX_PARAMETERS:,} are built (HF_VIT_ALLOW=large builds more)"
        )


def resnet_weights(depths: Sequence[int], width: int, channels: int) -> int:
    """Count the weights of a ResNet's convolutions.

    Args:
        depths: units per stage.
        width: channels of the root convolution.
        channels: number of image channels.
    """
    total, inputs = 7 * 7 * channels * width, width
    for stage, depth in enumerate(depths):
        inner, outputs = width * 2**stage, 4 * width * 2**stage
        total += depth * (9 * inner * inner + inner * outputs)
        total += inputs * inner + inputs * outputs + (depth - 1) * outputs * inner
        inputs = outputs
    return total
