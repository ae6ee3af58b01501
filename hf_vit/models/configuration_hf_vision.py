"""Base class of all configurations: fields with limits, and the reader of config.json files.

A field is checked whenever it is set. `validate_architecture` checks combinations of fields before a model is built.
"""

import math
import os
import re
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from huggingface_hub.dataclasses import strict as hub_strict
from huggingface_hub.dataclasses import validated_field
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from .utils import (
    LOCATION_ARGUMENTS,
    ManifestCleanupMixin,
    Size,
    check_arguments,
    check_model_path,
    describe_unknown,
    explain_missing_folder,
    read_json_object,
)
from .utils import (
    as_pair as as_pair,
)
from .utils import (
    check_choice as check_choice,
)

logger = logging.get_logger(__name__)

# Arguments other than the fields, which a configuration gets from transformers.
_KNOWN_EXTRAS = frozenset(
    "_attn_implementation _commit_hash _name_or_path attn_implementation auto_map experts_implementation model_type "
    "name_or_path num_labels output_attentions quantization_config tie_last_hidden_states tie_word_embeddings "
    "torch_dtype use_cache".split()
)
# Arguments of `from_pretrained` that locate a config.json.
_LOCATION_ARGUMENTS = (*LOCATION_ARGUMENTS, "trust_remote_code", "_from_auto", "_from_pipeline")
# Arguments of `from_pretrained` that a configuration accepts but does not use.
_UNUSED_ARGUMENTS = frozenset("adapter_kwargs code_revision gguf_file quantization_config user_agent".split())
# Attention implementations that a config.json may select. Others are names of kernel repositories on the Hub, whose
# code would be downloaded.
ATTENTION_IMPLEMENTATIONS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)


def score_function(config: PreTrainedConfig) -> Literal["softmax", "sigmoid", "none"]:
    """Return the function that converts logits to scores, as in transformers' ImageClassificationPipeline.

    Returns:
        "sigmoid" for multi-label classification and for a single label, "none" for regression, otherwise "softmax".
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


def thresholds_of(config: PreTrainedConfig) -> list[float]:
    """Return the lowest score at which a multi-label classifier predicts each class."""
    stored, classes = getattr(config, "label_thresholds", None) or [], len(config.id2label or ())
    return stored if len(stored) == classes else [0.5] * classes


class HfVisionConfig(ManifestCleanupMixin, BackboneConfigMixin, PreTrainedConfig):
    """Base class of the configurations; subclasses are `@strict` and declare `num_channels` and `image_size`."""

    num_channels: int = 3
    image_size: Size = 224
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    if TYPE_CHECKING:
        num_labels: int = 2  # transformers declares it as optional

    def __post_init__(self, **kwargs: Any):
        out_features, out_indices = kwargs.pop("out_features", None), kwargs.pop("out_indices", None)
        check_arguments(type(self).__name__, kwargs, self.argument_names())
        for name in ("id2label", "label2id"):
            if not isinstance(getattr(self, name), dict | None):
                raise ValueError(f"{name} is {reprlib.repr(getattr(self, name))} (expected a dictionary)")
        num_labels, names, numbers = kwargs.get("num_labels"), self.id2label or {}, self.label2id or {}
        if num_labels is not None and (type(num_labels) is not int or not 0 <= num_labels <= MAX_LABELS):
            raise ValueError(f"num_labels is {reprlib.repr(num_labels)} (expected an int from 0 to {MAX_LABELS:,})")
        is_counted = {str(number) for number in names} == {str(number) for number in range(min(len(names), MAX_LABELS))}
        if not is_counted or not all(isinstance(name, str) for name in names.values()):
            raise ValueError(f"id2label is {reprlib.repr(names)} (expected class numbers 0, 1, 2, ... and their names)")
        if not all(str(number).isdecimal() for number in numbers.values()):
            raise ValueError(f"label2id is {reprlib.repr(numbers)} (expected class names and their numbers)")
        super().__post_init__(**kwargs)
        self.set_output_features_output_indices(out_features=out_features, out_indices=out_indices)

    @classmethod
    def argument_names(cls) -> set[str]:
        """Return the names of all arguments of the constructor."""
        return {field.name for field in fields(cls)} | _KNOWN_EXTRAS | {"out_features", "out_indices"}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a configuration, as in transformers.

        Raises:
            ValueError: an argument is unknown. transformers would ignore it.
        """
        wants_unused = kwargs.pop("return_unused_kwargs", False)
        config, unused = super().from_pretrained(
            pretrained_model_name_or_path, *args, return_unused_kwargs=True, **kwargs
        )
        if wants_unused:
            return config, unused
        check_arguments(
            cls.__name__, (name for name in unused if name[0] != "_"), cls.argument_names() | _UNUSED_ARGUMENTS
        )
        return config

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration, as in transformers; unknown fields of a config.json are kept, with a warning.

        Raises:
            ValueError: a value has the wrong type, or the attention implementation is not one of
                `ATTENTION_IMPLEMENTATIONS`.
        """
        known = cls.argument_names()
        for name in ("attn_implementation", "_attn_implementation"):
            check_attention(config_dict.get(name))
        settings = {name: value for name, value in config_dict.items() if name in known}
        with convert_type_errors("the config.json"):
            result: Any = super().from_dict(settings, **kwargs)
        unknown = {name: value for name, value in config_dict.items() if name not in known}
        if unknown:
            logger.warning_once(f"config.json has fields that {cls.__name__} does not use: {describe_unknown(unknown)}")
            config = result[0] if isinstance(result, tuple) else result
            # Never set transformers' own attributes: `_attn_implementation_internal` could name a kernel repository.
            vars(config).update({name: value for name, value in unknown.items() if not hasattr(config, name)})
        return result

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike) -> Any:
        """Read a configuration from a file, with `from_dict`."""
        return cls.from_dict(read_json_object(json_file))

    # transformers' versions of the following methods read fields of language models.

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

        Raises:
            ValueError: the `model_type` is that of another class; the message says how to load the model.
        """
        where = {name: kwargs.pop(name) for name in _LOCATION_ARGUMENTS if name in kwargs}
        settings = read_settings(pretrained_model_name_or_path, **where)
        cls.check_model_type(settings, str(pretrained_model_name_or_path))
        return settings, kwargs

    @classmethod
    def check_model_type(cls, settings: dict[str, Any], folder: str) -> None:
        """Raise ValueError if the `model_type` is that of another class; the message says how to load the model."""
        stored = settings.get("model_type")
        if stored == cls.model_type:
            return
        call = f"hf_vit.load({folder!r}), or `hf-vit convert {folder} OUTPUT`"
        if str(stored).startswith("hf_"):
            call = f"{saved_class(settings) or 'AutoModel'} or hf_vit.load"
        raise ValueError(f"{folder} has a model of type {stored} (expected {cls.model_type}); use {call}")

    def validate_architecture(self) -> None:
        """Check combinations of fields; called after construction, and again when a model is built."""


def saved_class(settings: dict[str, Any]) -> str | None:
    """Return the name of the model class in a config.json; for a hybrid, HfViTFor... becomes HfViTHybridFor...."""
    name = next(iter(settings.get("architectures") or ()), None)
    if name is None or settings.get("model_type") != "hf_vit_hybrid":
        return name
    return re.sub("^HfViT(?!Hybrid)", "HfViTHybrid", name)


Config = TypeVar("Config", bound=type)

# Upper limits. For comparison: ViT-G/14, the largest of the family, has 48 layers and 1,664 channels; an image of
# 8,000 x 6,000 pixels has 187,500 patches of 16; ImageNet-21k has 21,843 classes.
MAX_LAYERS = 1_000
MAX_WIDTH = 2**17  # channels anywhere
MAX_STAGES = 8  # of a ResNet
MAX_LABELS = 2**18
MAX_PIXELS = 2**28  # of an image
MAX_TOKENS = 2**20  # patches of an image


@contextmanager
def _value_errors() -> Iterator[None]:
    """Convert the errors of huggingface_hub's `@strict` to ValueErrors of one line."""
    try:
        yield
    except StrictDataclassClassValidationError as error:
        raise ValueError(str(error.__cause__)) from error
    except StrictDataclassFieldValidationError as error:
        raise ValueError(" ".join(str(error)[:500].split())) from error


def strict(config_class: Config) -> Config:
    """Apply huggingface_hub's `@strict`; its errors become ValueErrors."""
    checked: Any = hub_strict(config_class)
    checked.__init__, checked.__setattr__ = _value_errors()(checked.__init__), _value_errors()(checked.__setattr__)
    return checked


# Fields with limits. None is valid if the field's type allows it.


def _limited(default: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
    def check(value: Any) -> None:
        if value is not None and not is_valid(value):
            raise ValueError(f"{reprlib.repr(value)} (expected {expected})")

    return validated_field(check, default=default)


def int_field(default: int | None, highest: int) -> Any:
    """Declare an int field with values from 1 to `highest`."""
    return _limited(default, lambda value: 1 <= value <= highest, f"1 to {highest:,}")


def float_field(default: float) -> Any:
    """Declare a float field with finite values of 0 or more."""
    return _limited(default, lambda value: 0 <= value < math.inf, "a finite number, 0 or more")


def rate_field(default: float) -> Any:
    """Declare a field for a rate: at least 0 and less than 1."""
    return _limited(default, lambda value: 0 <= value < 1, "at least 0 and less than 1")


def size_field(default: Size | None) -> Any:
    """Declare a field for a size: an int or (height, width)."""
    return _limited(default, _is_size, _SIZE)


def stages_field(default: tuple[int, ...]) -> Any:
    """Declare a field for the number of units in each stage of a ResNet."""
    return _limited(default, _are_stages, f"at most {MAX_STAGES} stages and {MAX_LAYERS:,} units, 1 or more in each")


def _are_stages(depths: Any) -> bool:
    return len(depths) <= MAX_STAGES and min(depths, default=1) >= 1 and sum(depths) <= MAX_LAYERS


_SIZE = f"an int or (height, width), at least 1 and at most {MAX_PIXELS:,} in area"


def _is_size(size: Any) -> bool:
    sides = (size, size) if isinstance(size, int) else size
    is_pair = isinstance(sides, list | tuple) and len(sides) == 2 and all(isinstance(side, int) for side in sides)
    return is_pair and min(sides) >= 1 and sides[0] * sides[1] <= MAX_PIXELS


def check_size(name: str, size: Size) -> None:
    """Raise ValueError unless a size is an int or (height, width), at least 1 and at most `MAX_PIXELS` in area."""
    if not _is_size(size):
        raise ValueError(f"{name} is {reprlib.repr(size)}; expected {_SIZE}")


class _ConfigReader(PreTrainedConfig):
    """Reader of a config.json of any model type, local or on the Hub, within the limits of `read_json_object`."""

    @classmethod
    def _dict_from_json_file(cls, json_file: str | os.PathLike) -> dict[str, Any]:
        return read_json_object(json_file)


def read_settings(name: str | os.PathLike, **where: Any) -> dict[str, Any]:
    """Read the config.json of a folder or a Hub repository.

    Args:
        where: arguments of `from_pretrained` that locate the file, such as `revision`.

    Raises:
        ValueError: the file is damaged, too large or nested too deeply, or its `model_type` or `architectures` has the
            wrong type.
        OSError: the file does not exist or cannot be read.
    """
    check_model_path(name, where.get("subfolder"))
    with convert_type_errors(f"the config.json of {name}"), explain_missing_folder(name):
        settings, _ = _ConfigReader.get_config_dict(name, **where)
        model_type, architectures = settings.get("model_type"), settings.get("architectures")
    if not isinstance(model_type, str | None):
        raise ValueError(f"the config.json of {name} has the model_type {reprlib.repr(model_type)}; expected a string")
    if not isinstance(architectures or [], list) or not all(isinstance(entry, str) for entry in architectures or []):
        raise ValueError(
            f"the config.json of {name} has architectures {reprlib.repr(architectures)}; expected a list of class names"
        )
    return settings


@contextmanager
def convert_type_errors(what: str) -> Iterator[None]:
    """Convert errors such as TypeError, in a block that reads values of a JSON file, to a ValueError.

    Args:
        what: name of the file, for the message.

    Raises:
        ValueError: a value has the wrong type.
    """
    try:
        yield
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise ValueError(f"{what} has a value of the wrong type ({reason})") from error


def check_attention(name: Any) -> None:
    """Raise ValueError if the attention implementation in a config.json is not in `ATTENTION_IMPLEMENTATIONS`."""
    if name is not None and name not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"the config.json has attn_implementation {reprlib.repr(name)} (expected one of "
            f"{', '.join(ATTENTION_IMPLEMENTATIONS)}); to use any other, pass attn_implementation= to from_pretrained"
        )
