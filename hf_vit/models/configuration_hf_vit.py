"""Configurations of the Vision Transformer and the hybrids; the defaults are the values of the original code.

The base class, `HfVisionConfig`, is also that of BiT. A field is checked whenever it is set. `validate_architecture`
checks combinations of fields before a model is built.
"""

import copy
import math
import operator
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from huggingface_hub.dataclasses import strict as hub_strict
from huggingface_hub.dataclasses import validated_field
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassError
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from .utils import (
    LOCATION_ARGUMENTS,
    Size,
    as_pair,
    check_arguments,
    check_choice,
    check_model_path,
    explain_missing_folder,
    read_json_object,
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
# Arguments of `from_pretrained` that a configuration accepts but does not use, such as those of transformers' scripts.
_UNUSED_ARGUMENTS = frozenset(
    "adapter_kwargs code_revision finetuning_task gguf_file quantization_config use_auth_token user_agent".split()
)
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
Config = TypeVar("Config", bound=type)
# Upper limits. For comparison: ViT-G/14, the largest of the family, has 48 layers and 1,664 channels; an image of
# 8,000 x 6,000 pixels has 187,500 patches of 16; ImageNet-21k has 21,843 classes.
MAX_LAYERS = 1_000
MAX_WIDTH = 2**17  # channels anywhere
MAX_STAGES = 8  # of a ResNet
MAX_LABELS = 2**18
MAX_PIXELS = 2**28  # of an image
MAX_TOKENS = 2**20  # patches of an image
_SIZE = f"an int or (height, width), at least 1 and at most {MAX_PIXELS:,} in area"
# The released models (Table 1 of arXiv 2010.11929 and of 2106.10270; vit_jax/configs/models.py).
_SIZES = {
    #      layers, hidden, MLP, heads
    "Ti": (12, 192, 768, 3),
    "S": (12, 384, 1536, 6),
    "B": (12, 768, 3072, 12),
    "L": (24, 1024, 4096, 16),
    "H": (32, 1280, 5120, 16),
}
_PATCH_SIZES = {"Ti": (16,), "S": (32, 16), "B": (32, 16, 8), "L": (32, 16), "H": (14,)}
# The two ResNet-50 stems of the hybrids (section 3.1): all four stages, with stride 32; or the units of stage 4 moved
# to stage 3, with stride 16 and four times as many tokens.
STAGE_4, EXTENDED_STAGE_3 = (3, 4, 6, 3), (3, 4, 9)
# name: (key of _SIZES, patch size on the stem's feature map, stem depths or None for no stem)
VARIANTS: dict[str, tuple[str, int, tuple[int, ...] | None]] = {
    **{f"{size}/{patch}": (size, patch, None) for size, patches in _PATCH_SIZES.items() for patch in patches},
    "R+Ti/16": ("Ti", 8, ()),
    "R26+S/32": ("S", 1, (2, 2, 2, 2)),
    "R26+B/32": ("B", 1, (2, 2, 2, 2)),
    "R50+B/32": ("B", 1, STAGE_4),
    "R50+B/16": ("B", 1, EXTENDED_STAGE_3),
    "R50+L/32": ("L", 1, STAGE_4),
    "R50+L/16": ("L", 1, EXTENDED_STAGE_3),
}
# The models of "Surrogate Gap Minimization" (GSAM): mean pooling, no class token, no pre-logits layer.
VARIANTS |= {f"{name}-gap-norep": VARIANTS[name] for name in ("S/32", "S/16", "B/32", "B/16")}
_Config = TypeVar("_Config", bound="HfViTConfig")


class HfVisionConfig(BackboneConfigMixin, PreTrainedConfig):
    """Base class of the configurations; subclasses are `@strict` and declare `num_channels` and `image_size`."""

    num_channels: int = 3
    image_size: Size = 224
    label_thresholds: list[float] | None = None
    temperature: float | None = None
    coverage_thresholds: dict[str, float] | None = None
    rejection_thresholds: list[float] | None = None
    head_init: Literal["zeros", "normal"] = "zeros"
    initializer_range: float = 0.02
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None
    if TYPE_CHECKING:
        num_labels: int = 2  # transformers declares it as optional

    def __post_init__(self, **kwargs: Any):
        out_features, out_indices = kwargs.pop("out_features", None), kwargs.pop("out_indices", None)
        check_arguments(type(self).__name__, kwargs, self.argument_names())
        with convert_type_errors("num_labels, id2label or label2id"):
            count, names, numbers = kwargs.get("num_labels") or 0, self.id2label or {}, self.label2id or {}
            if not 0 <= count <= MAX_LABELS:
                raise ValueError(f"num_labels is {count} (expected 0 to {MAX_LABELS:,})")
            is_counted = {str(name) for name in names} == {str(name) for name in range(min(len(names), MAX_LABELS))}
            are_names = all(isinstance(name, str) for name in names.values())
            if not (is_counted and are_names and all(str(number).isdecimal() for number in numbers.values())):
                found = f"id2label is {reprlib.repr(names)} and label2id is {reprlib.repr(numbers)}"
                raise ValueError(f"{found} (expected class numbers 0, 1, 2, ... and their names)")
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
        if (names := kwargs.pop("id2label", None)) is not None:  # transformers would not check it, nor change label2id
            with convert_type_errors("id2label"):
                numbers = {name: int(number) for number, name in names.items()}
            settings |= {"id2label": names, "label2id": kwargs.pop("label2id", None) or numbers}
        with convert_type_errors("the config.json"):
            result: Any = super().from_dict(settings, **kwargs)
        unknown = {name: value for name, value in config_dict.items() if name not in known}
        if unknown:
            logger.warning_once(f"config.json has fields that {cls.__name__} does not use: {reprlib.repr([*unknown])}")
            config = result[0] if isinstance(result, tuple) else result
            # Never set transformers' own attributes: `_attn_implementation_internal` could name a kernel repository.
            vars(config).update({name: value for name, value in unknown.items() if not hasattr(config, name)})
        return result

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read the settings of a config.json.

        Raises:
            ValueError: the `model_type` is that of another class; the message says how to load the model.
        """
        where = {name: kwargs.pop(name) for name in _LOCATION_ARGUMENTS if name in kwargs}
        name, settings = pretrained_model_name_or_path, read_settings(pretrained_model_name_or_path, **where)
        if (stored := settings.get("model_type")) != cls.model_type:
            found = f"a {saved_class(settings) or 'model'} of type {stored}"
            raise ValueError(f"{name} has {found} (expected {cls.model_type}); use hf_vit.load, or `hf-vit convert`")
        return settings, kwargs

    @property
    def initial_head_std(self) -> float:
        """Standard deviation of the weights of a new classification head."""
        return self.initializer_range if self.head_init == "normal" else 0.0

    def clear_calibration(self) -> None:
        """Delete the thresholds and the temperature, which belong to a head that is replaced."""
        for name in ("label_thresholds", "temperature", "coverage_thresholds", "rejection_thresholds"):
            setattr(self, name, None)

    def validate_architecture(self) -> None:
        """Check combinations of fields; called after construction, and again when a model is built."""


def saved_class(settings: dict[str, Any]) -> str | None:
    """Return the name of the model class in a config.json; for a hybrid, HfViTFor... becomes HfViTHybridFor...."""
    name = next(iter(settings.get("architectures") or ()), None)
    if name is None or settings.get("model_type") != "hf_vit_hybrid":
        return name
    return re.sub("^HfViT(?!Hybrid)", "HfViTHybrid", name)


@contextmanager
def value_errors() -> Iterator[None]:
    """Convert the errors of huggingface_hub's validation of dataclasses and dictionaries to ValueErrors of one line."""
    try:
        yield
    except StrictDataclassClassValidationError as error:  # of `validate_architecture`
        raise ValueError(str(error.__cause__)) from error
    except StrictDataclassError as error:
        raise ValueError(" ".join(str(error)[:1000].split())) from error


def strict(config_class: Config) -> Config:
    """Apply huggingface_hub's `@strict`; its errors become ValueErrors."""
    checked: Any = hub_strict(config_class)
    checked.__init__, checked.__setattr__ = value_errors()(checked.__init__), value_errors()(checked.__setattr__)
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


def float_field(default: float, below: float = math.inf) -> Any:
    """Declare a float field with values of at least 0 and less than `below`."""
    return _limited(default, lambda value: 0 <= value < below, f"at least 0 and less than {below}")


def size_field(default: Size | None) -> Any:
    """Declare a field for a size: an int or (height, width)."""
    return _limited(default, _is_size, _SIZE)


def stages_field(default: tuple[int, ...]) -> Any:
    """Declare a field for the number of units in each stage of a ResNet."""

    def are_valid(depths: Any) -> bool:
        return len(depths) <= MAX_STAGES and min(depths, default=1) >= 1 and sum(depths) <= MAX_LAYERS

    return _limited(default, are_valid, f"at most {MAX_STAGES} stages and {MAX_LAYERS:,} units, 1 or more in each")


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
        names = [settings.get("model_type") or "", *(settings.get("architectures") or ())]
    if not all(isinstance(one, str) for one in names):
        raise ValueError(f"the config.json of {name} has {reprlib.repr(names)} as model_type and architectures")
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
        raise ValueError(f"attn_implementation is {reprlib.repr(name)}; known: {', '.join(ATTENTION_IMPLEMENTATIONS)}")


@strict
class HfViTConfig(HfVisionConfig):
    r"""Configuration of a Vision Transformer (arXiv 2010.11929).

    Fields that transformers' `ViTConfig` also has have the same names. The defaults are ViT-B/16 with tanh GELU and
    LayerNorm epsilon 1e-6, as in the original JAX code.

    Args:
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: sizes of the encoder.
        hidden_act: activation of the MLPs.
        hidden_dropout_prob: dropout after the position embeddings, each MLP layer and each attention block.
        attention_probs_dropout_prob: dropout of the attention probabilities.
        drop_path_rate: stochastic depth rate of the last layer; the rate grows linearly from 0 at the first layer.
        initializer_range: standard deviation for initializing position embeddings, the mask token for masked patch
            prediction, and a classification head with head_init "normal".
        layer_norm_eps: epsilon of every LayerNorm.
        image_size, patch_size: an int or (height, width), in pixels.
        num_channels: number of image channels.
        stored_patch_size: in a flexible model (FlexiViT, arXiv 2212.08013), the size of the stored kernel; each
            forward pass resizes the kernel to `patch_size`. None: the model is not flexible.
        position_grid: in a flexible model, (rows, columns) of the stored position embeddings, or an int for a square
            grid; None: the grid of `image_size`.
        qkv_bias: use biases in the query, key and value projections.
        pooling: input of the head: "cls" (the first token), "mean" (of all tokens), "map" (big_vision's multi-head
            attention pooling) or "none" (every token).
        use_cls_token: put a class token before the patches; None: only with pooling "cls".
        no_embed_class: the class token has no position; learned position embeddings are those of the patches only, as
            in big_vision and with timm's argument of this name. Sine-cosine positions are always so.
        representation_size: width of the tanh pre-logits layer; None: no such layer.
        projection_dim: width of the projection (`image_embeds`) in the image tower of an image-text model; None: no
            projection.
        position_embedding_type: "learned" (one vector per token, the paper's 1-D), "learned2d" (one vector of
            hidden_size / 2 for each row and each column), "relative" (1-D relative positions in every attention),
            "sincos2d" (fixed, as in MoCo v3) or "none".
        position_embedding_placement: where learned position embeddings are added: "input" (before the first layer),
            "every_layer" (before every layer, one table per layer) or "every_layer_shared" (before every layer, one
            table for all).
        attention_axes: "all": attention over all tokens. "axial": attention over the token's row in one layer and over
            its column in the next; two layers are one block of the paper's Axial-ViT. "axial" needs an even number of
            layers and no class token.
        position_interpolation: resampling of learned position embeddings for other image sizes: "jax" (bilinear,
            aligned corners), "jax_exact" (the same, with the original's rounding error), "bilinear" or "bicubic"
            (half-pixel centers, antialiased, as in timm), "bicubic_aliased" (not antialiased, as in transformers), or
            "bicubic_aligned" (aligned corners, as in torchvision).
        pool_patches_only: exclude the class token from "mean" and "map" pooling, as in timm.
        norm_after_pooling: apply the final LayerNorm after the pooling (timm's `fc_norm`); `last_hidden_state` is then
            not normalized.
        reshape_hidden_states: a backbone returns feature maps; False: the tokens, with the class token, as Dinov2's.
        apply_layernorm: a backbone applies the final LayerNorm to what it returns.
        image_size_history: previous image sizes if the position embeddings were resampled, the training size first;
            None if they were not.
        label_thresholds: for multi-label classification, the lowest score at which each class is predicted, chosen on
            held-out images; None: 0.5.
        temperature: temperature fitted by `hf_vit.calibrate`, by which the head's weights are already divided.
        coverage_thresholds: coverage, such as "0.95" -> the lowest probability at which a class is in the prediction
            set (conformal prediction).
        rejection_thresholds: for each class, the lowest logit at which a prediction of this class is accepted. Images
            with a lower logit are rejected, because they probably show none of the classes.
        head_init: weights of a new classification head: "zeros", as in the paper, or "normal".
        patch_target: target of masked patch prediction: "mean_color" (3 bits per channel), "downsized" (the same for
            each cell of a 4 x 4 grid) or "pixels".

    Raises:
        ValueError: fields contradict each other, or an argument is unknown.

    Example:
        >>> from hf_vit import HfViTConfig
        >>> config = HfViTConfig(image_size=(224, 320), num_hidden_layers=2)
        >>> config.grid_size
        (14, 20)
    """

    model_type = "hf_vit"

    hidden_size: int = int_field(768, MAX_WIDTH)
    num_hidden_layers: int = int_field(12, MAX_LAYERS)
    num_attention_heads: int = int_field(12, MAX_WIDTH)
    intermediate_size: int = int_field(3072, MAX_WIDTH)
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_dropout_prob: float | int = float_field(0.0, below=1)
    attention_probs_dropout_prob: float | int = float_field(0.0, below=1)
    drop_path_rate: float | int = float_field(0.0, below=1)
    initializer_range: float = float_field(0.02)
    layer_norm_eps: float = float_field(1e-6)
    image_size: Size = size_field(224)
    patch_size: Size = size_field(16)
    num_channels: int = int_field(3, MAX_WIDTH)
    qkv_bias: bool = True
    pooling: Literal["cls", "mean", "map", "none"] = "cls"
    use_cls_token: bool | None = None
    no_embed_class: bool = False
    representation_size: int | None = int_field(None, MAX_WIDTH)
    projection_dim: int | None = int_field(None, MAX_WIDTH)
    position_embedding_type: Literal["learned", "sincos2d", "learned2d", "relative", "none"] = "learned"
    position_embedding_placement: Literal["input", "every_layer", "every_layer_shared"] = "input"
    attention_axes: Literal["all", "axial"] = "all"
    position_interpolation: Literal["jax", "jax_exact", "bilinear", "bicubic", "bicubic_aliased", "bicubic_aligned"] = (
        "jax"
    )
    pool_patches_only: bool = False
    norm_after_pooling: bool = False
    reshape_hidden_states: bool = True
    apply_layernorm: bool = True
    image_size_history: list[Size] | None = None
    patch_target: Literal["mean_color", "downsized", "pixels"] = "mean_color"
    stored_patch_size: Size | None = size_field(None)
    position_grid: Size | None = size_field(None)

    base_model_tp_plan = {  # noqa: RUF012 - transformers declares it as a class variable
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    }

    def __post_init__(self, **kwargs):
        if self.use_cls_token is None:
            self.use_cls_token = self.pooling == "cls"
        super().__post_init__(**kwargs)

    @classmethod
    def from_variant(cls, name: str, /, **overrides: Any) -> "HfViTConfig":
        """Return the configuration of a released model, e.g. `from_variant("B/16", image_size=384)`.

        Args:
            name: a key of `VARIANTS`; names with an R (for ResNet) return an `HfViTHybridConfig`.
            overrides: values for any fields of the configuration.

        Raises:
            ValueError: `name` is unknown.
        """
        check_choice("variant", name, VARIANTS)
        size, patch_size, stem_depths = VARIANTS[name]
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
        fields: dict[str, Any] = {**dict(zip(names, _SIZES[size], strict=True)), "patch_size": patch_size}
        if name.endswith("-gap-norep"):
            fields["pooling"] = "mean"
        if stem_depths is None:
            return HfViTConfig(**{**fields, **overrides})
        return HfViTHybridConfig(**{**fields, "stem_depths": list(stem_depths), **overrides})

    def without_projection(self: _Config) -> _Config:
        """Return a copy without a projection, or the same object if there is no projection."""
        if self.projection_dim is None:
            return self
        config = copy.copy(self)
        config.projection_dim = None
        return config

    @property
    def output_attentions(self) -> bool:
        """True if forward passes return attentions by default; works with every attention implementation."""
        return bool(self._output_attentions)

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    @property
    def stage_names(self) -> list[str]:
        """Names for a backbone's `out_features`: the embeddings ("stem"), then the output of each layer."""
        return ["stem"] + [f"stage{number}" for number in range(1, self.num_hidden_layers + 1)]

    @property
    def stride(self) -> int:
        """Stride, in image pixels, of the feature map that is cut into patches: 1, or a hybrid's stem stride."""
        return 1

    @property
    def encoder_stride(self) -> int | tuple[int, int]:
        """Pixels of the image for each patch, under the name of transformers' masked image modeling: `patch_size`."""
        height, width = (size * self.stride for size in as_pair(self.patch_size))
        return height if height == width else (height, width)

    @encoder_stride.setter
    def encoder_stride(self, value: int) -> None:
        if value != self.encoder_stride:
            raise ValueError(f"encoder_stride is {value}; expected that of the patches, {self.encoder_stride}")

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches."""
        return int(bool(self.use_cls_token))

    @property
    def num_prefix_positions(self) -> int:
        """Number of position embeddings before those of the patches."""
        has_none = self.no_embed_class or self.position_embedding_type == "sincos2d"
        return 0 if has_none else self.num_prefix_tokens

    @property
    def adds_positions_to_input(self) -> bool:
        """True if position embeddings are added to the tokens before the first layer, and only there."""
        return self.position_embedding_placement == "input" and self.position_embedding_type not in ("relative", "none")

    @property
    def needs_one_grid(self) -> bool:
        """True if layers use the positions of patches, so that all images of a batch must have the same size."""
        return (
            self.position_embedding_placement != "input"
            or self.position_embedding_type == "relative"
            or self.attention_axes == "axial"
        )

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patches at `image_size`, rounded down in a flexible model."""
        if not self.is_flexible:
            return self.grid_of(*as_pair(self.image_size))
        steps = (patch * self.stride for patch in as_pair(self.patch_size))
        rows, columns = (max(size // step, 1) for size, step in zip(as_pair(self.image_size), steps, strict=True))
        return rows, columns

    @property
    def is_flexible(self) -> bool:
        """True if each forward pass resizes the stored kernel and position embeddings (FlexiViT)."""
        return self.stored_patch_size is not None

    @property
    def kernel_size(self) -> tuple[int, int]:
        """(height, width) of the stored kernel of the patch embedding."""
        return as_pair(self.patch_size if self.stored_patch_size is None else self.stored_patch_size)

    @property
    def stored_grid(self) -> tuple[int, int]:
        """(rows, columns) of the stored position embeddings."""
        return self.grid_size if self.position_grid is None else as_pair(self.position_grid)

    def resolve_patch_size(self, patch_size: Size | None) -> tuple[int, int]:
        """Return the patch size of a forward pass as (height, width).

        Args:
            patch_size: argument of the forward pass; None: that of the configuration.

        Raises:
            ValueError: it is not a valid size, or it differs from the configuration's and the model is not flexible.
        """
        if patch_size is None:
            return as_pair(self.patch_size)
        check_size("patch_size", patch_size)
        if not self.is_flexible and as_pair(patch_size) != as_pair(self.patch_size):
            raise ValueError(f"patch_size is {patch_size}, not {self.patch_size}: call make_flexible() first")
        height, width = as_pair(patch_size)
        return operator.index(height), operator.index(width)  # plain ints, also under torch.compile

    def grid_of(self, height: int, width: int, patch_size: Size | None = None) -> tuple[int, int]:
        """Return (rows, columns) of the patches of an image.

        Args:
            height, width: in pixels.
            patch_size: as in `resolve_patch_size`.

        Raises:
            ValueError: the image size is not a multiple of the patch size; the message names the nearest valid sizes.
        """
        grid, patches = [], self.resolve_patch_size(patch_size)
        for name, pixels, patch in zip(("height", "width"), (height, width), patches, strict=True):
            map_pixels = -(-pixels // self.stride)  # rounded up, because the stem pads as 'SAME'
            if map_pixels < patch or map_pixels % patch:
                step = patch * self.stride
                nearest = sorted({max(pixels // step, 1) * step, (pixels // step + 1) * step})
                raise ValueError(
                    f"image {name} {pixels} is not a multiple of {step}, the {name} of a patch in pixels; "
                    f"the nearest sizes are {' and '.join(map(str, nearest))}"
                )
            grid.append(map_pixels // patch)
        return grid[0], grid[1]

    def validate_architecture(self) -> None:
        """Check combinations of fields; called after construction, and again when a model is built.

        Raises:
            ValueError: fields contradict each other.
        """
        kind, placement = self.position_embedding_type, self.position_embedding_placement
        if self.hidden_size % (heads := self.num_attention_heads):
            raise ValueError(f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads ({heads})")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act is {self.hidden_act[:50]!r}; known: {', '.join(sorted(ACT2FN))}")
        if self.position_grid is not None and not self.is_flexible:
            raise ValueError(f"position_grid is {self.position_grid}, which needs stored_patch_size; set both")
        if self.hidden_size % (divisor := {"sincos2d": 4, "learned2d": 2}.get(kind, 1)):
            raise ValueError(f"hidden_size ({self.hidden_size}) is not a multiple of {divisor}, as {kind} requires")
        if placement != "input" and kind not in ("learned", "learned2d"):
            raise ValueError(f"position_embedding_placement {placement} needs learned or learned2d, not {kind}")
        if self.no_embed_class and (placement != "input" or kind == "relative"):
            raise ValueError(f"no_embed_class needs positions that are added to the input, not {kind} in {placement}")
        if self.attention_axes == "axial" and (self.use_cls_token or kind == "relative" or self.num_hidden_layers % 2):
            raise ValueError("axial attention needs use_cls_token=False, even num_hidden_layers, no relative positions")
        rows, columns = self.grid_size
        if rows * columns > MAX_TOKENS:
            raise ValueError(f"image_size {self.image_size} makes {rows * columns:,} patches; at most {MAX_TOKENS:,}")


def stem_stride(stem_depths: Sequence[int]) -> int:
    """Return the stem's stride in image pixels: 4 for root and max-pool, doubled by each stage except the first."""
    return 4 * 2 ** max(len(stem_depths) - 1, 0)


@strict
class HfViTHybridConfig(HfViTConfig):
    r"""Configuration of a hybrid: a Vision Transformer on the feature map of a BiT ResNet stem.

    `patch_size` is in pixels of the stem's feature map, as in the original. For the other arguments, see `HfViTConfig`.

    Args:
        stem_depths: residual units per stage, such as [3, 4, 9]; empty: only the root convolution and max-pool.
        stem_width: channels of the root convolution, a multiple of 32 (the number of groups of its GroupNorm).
        group_norm_eps: epsilon of every GroupNorm in the stem.
        weight_standardization_eps: epsilon of the weight standardization.
        weight_standardization_form: what this epsilon is added to: the "std", as in the original, or the "variance", as
            in timm and transformers.
    """

    model_type = "hf_vit_hybrid"

    patch_size: Size = size_field(1)
    stem_depths: list[int] | tuple[int, ...] = stages_field((3, 4, 9))
    stem_width: int = int_field(64, MAX_WIDTH)
    group_norm_eps: float = float_field(1e-6)
    weight_standardization_eps: float = float_field(1e-5)
    weight_standardization_form: Literal["std", "variance"] = "std"

    # The other options of `HfBiTConfig`, which are not fields here: those of vit_jax/models_resnet.py.
    layer_type, padding, pool_padding = "bottleneck", "same", "lowest"

    @property
    def stride(self) -> int:
        return stem_stride(self.stem_depths)

    def validate_architecture(self) -> None:
        if self.stem_width % 32:
            raise ValueError(f"stem_width ({self.stem_width}) is not a multiple of 32 (the groups of GroupNorm)")
        super().validate_architecture()
