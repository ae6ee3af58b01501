"""Configurations of the Vision Transformer and the hybrids; the defaults are the values of the original code.

The base class, `HfVisionConfig`, is also that of BiT. A field is checked whenever it is set. `validate_architecture`
checks combinations of fields before a model is built.
"""

import copy
import operator
import reprlib
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from .sizes import (
    MAX_LABELS,
    MAX_LAYERS,
    MAX_TOKENS,
    MAX_WIDTH,
    Size,
    as_pair,
    check_arguments,
    check_choice,
    check_size,
    float_field,
    int_field,
    size_field,
    stages_field,
    strict,
)

logger = logging.get_logger(__name__)
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
        out_features = kwargs.pop("out_features", None)
        out_indices = kwargs.pop("out_indices", None)
        check_arguments(type(self).__name__, kwargs, self.argument_names())
        num_labels = kwargs.get("num_labels") or 0
        if not (isinstance(num_labels, int) and 0 <= num_labels <= MAX_LABELS):
            raise ValueError(f"num_labels is {reprlib.repr(num_labels)} (expected 0 to {MAX_LABELS:,})")
        if not all(str(index).isdecimal() for index in (self.label2id or {}).values()):
            raise ValueError(f"label2id is {reprlib.repr(self.label2id)} (expected class indices)")
        super().__post_init__(**kwargs)
        if sorted(self.id2label or {}) != list(range(len(self.id2label or {}))):
            raise ValueError(f"id2label is {reprlib.repr(self.id2label)} (expected class indices 0, 1, 2, ...)")
        self.set_output_features_output_indices(out_features=out_features, out_indices=out_indices)

    @classmethod
    def argument_names(cls) -> set[str]:
        """Return the names of all arguments of the constructor."""
        return {field.name for field in fields(cls)} | _MORE_ARGUMENTS

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a configuration, as in transformers; unknown fields of a config.json are kept, with a warning.

        Raises:
            ValueError: the `model_type` is that of another class, or the file names code for the attention.
        """
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(f"model_type is {model_type} (expected {cls.model_type}); use hf_vit.load")
        for name in ("attn_implementation", "_attn_implementation"):
            if "/" in str(config_dict.get(name)):  # a repository of kernels, whose code would be downloaded
                raise ValueError(f"{name} is {config_dict[name]!r:.100}, which a config.json cannot choose")
        known = cls.argument_names()
        settings = {name: value for name, value in config_dict.items() if name in known}
        names = kwargs.pop("id2label", None)
        if names is not None:  # transformers would neither check it nor change label2id
            if not isinstance(names, dict):
                raise ValueError(f"id2label is {reprlib.repr(names)} (expected class indices and their names)")
            settings["id2label"] = names
            settings["label2id"] = kwargs.pop("label2id", {name: int(index) for index, name in names.items()})
        result: Any = super().from_dict(settings, **kwargs)
        unknown = {name: value for name, value in config_dict.items() if name not in known}
        if unknown:
            logger.warning_once(f"config.json has fields that {cls.__name__} does not use: {reprlib.repr([*unknown])}")
            config = result[0] if isinstance(result, tuple) else result
            # Not transformers' own attributes: `_attn_implementation` may name code on the Hub.
            vars(config).update({name: value for name, value in unknown.items() if not hasattr(config, name)})
        return result

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


# Arguments other than the fields, which a configuration gets from transformers.
_MORE_ARGUMENTS = frozenset(
    "_attn_implementation _commit_hash _name_or_path attn_implementation auto_map experts_implementation model_type "
    "name_or_path num_labels out_features out_indices output_attentions quantization_config tie_last_hidden_states "
    "tie_word_embeddings torch_dtype use_cache".split()
)


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
    def is_plain(self) -> bool:
        """True for a Vision Transformer as in modeling_hf_vit.py; others are in modeling_hf_vit_variants.py."""
        is_hybrid = self.model_type == HfViTHybridConfig.model_type
        has_plain_positions = self.adds_positions_to_input or self.position_embedding_type == "none"
        is_2d = self.position_embedding_type == "learned2d"
        return not (is_hybrid or self.is_flexible or self.needs_one_grid or is_2d) and has_plain_positions

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
        if self.stored_patch_size is None:
            return as_pair(self.patch_size)
        return as_pair(self.stored_patch_size)

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
        grid = []
        patches = self.resolve_patch_size(patch_size)
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
        heads = self.num_attention_heads
        if self.hidden_size % heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads ({heads})")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act is {self.hidden_act[:50]!r}; known: {', '.join(sorted(ACT2FN))}")
        if self.position_grid is not None and not self.is_flexible:
            raise ValueError(f"position_grid is {self.position_grid}, which needs stored_patch_size; set both")
        rows, columns = self.grid_size
        if rows * columns > MAX_TOKENS:
            raise ValueError(f"image_size {self.image_size} makes {rows * columns:,} patches; at most {MAX_TOKENS:,}")
        self._check_positions()

    def _check_positions(self) -> None:
        """Raise ValueError if fields of the position embeddings contradict each other or the sizes."""
        kind = self.position_embedding_type
        placement = self.position_embedding_placement
        divisor = {"sincos2d": 4, "learned2d": 2}.get(kind, 1)
        if self.hidden_size % divisor:
            raise ValueError(f"hidden_size ({self.hidden_size}) is not a multiple of {divisor}, as {kind} requires")
        if placement != "input" and kind not in ("learned", "learned2d"):
            raise ValueError(f"position_embedding_placement {placement} needs learned or learned2d, not {kind}")
        if self.no_embed_class and (placement != "input" or kind == "relative"):
            raise ValueError(f"no_embed_class needs positions that are added to the input, not {kind} in {placement}")
        if self.attention_axes == "axial" and (self.use_cls_token or kind == "relative" or self.num_hidden_layers % 2):
            raise ValueError("axial attention needs use_cls_token=False, even num_hidden_layers, no relative positions")


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
    layer_type = "bottleneck"
    padding = "same"
    pool_padding = "lowest"

    @property
    def stride(self) -> int:
        return stem_stride(self.stem_depths)

    def validate_architecture(self) -> None:
        if self.stem_width % 32:
            raise ValueError(f"stem_width ({self.stem_width}) is not a multiple of 32 (the groups of GroupNorm)")
        super().validate_architecture()


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
STAGE_4 = (3, 4, 6, 3)
EXTENDED_STAGE_3 = (3, 4, 9)
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
