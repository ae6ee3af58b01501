"""Configuration of the Vision Transformer and the hybrids, with the original's numbers as defaults."""

import copy
import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from transformers.activations import ACT2FN

from .configuration_hf_vision import (
    MAX_LAYERS,
    MAX_TOKENS,
    MAX_WIDTH,
    HfVisionConfig,
    Size,
    amount,
    as_pair,
    check_size,
    count,
    rate,
    refuse_unknown,
    size,
    stages,
    strict,
)

# The released models (Table 1 of arXiv 2010.11929 and of 2106.10270; vit_jax/configs/models.py).
_WIDTHS = {
    #      layers, hidden, MLP, heads
    "Ti": (12, 192, 768, 3),
    "S": (12, 384, 1536, 6),
    "B": (12, 768, 3072, 12),
    "L": (24, 1024, 4096, 16),
    "H": (32, 1280, 5120, 16),
}
# The two variants of a hybrid's ResNet-50 (section 3.1): with stage 4, which makes patches of 32 pixels; or with its
# units moved to stage 3, which makes patches of 16 pixels and a sequence four times as long.
STAGE_4, EXTENDED_STAGE_3 = (3, 4, 6, 3), (3, 4, 9)
# name: (width, patch size on the stem's feature map, stem depths or None for no stem)
VARIANTS = {
    "Ti/16": ("Ti", 16, None),
    "S/32": ("S", 32, None),
    "S/16": ("S", 16, None),
    "B/32": ("B", 32, None),
    "B/16": ("B", 16, None),
    "B/8": ("B", 8, None),
    "L/32": ("L", 32, None),
    "L/16": ("L", 16, None),
    "H/14": ("H", 14, None),
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


@strict
class HfViTConfig(HfVisionConfig):
    r"""A Vision Transformer of the original family (arXiv 2010.11929).

    Fields have the names of transformers' `ViTConfig` where it has them too. The defaults are ViT-B/16 with the numbers
    of the original JAX code (tanh GELU, LayerNorm epsilon 1e-6).

    Args:
        hidden_size, num_hidden_layers, num_attention_heads, intermediate_size: the sizes of the encoder.
        hidden_dropout_prob: dropout after the position embeddings, each MLP layer and the attention block.
        attention_probs_dropout_prob: dropout of the attention probabilities.
        drop_path_rate: stochastic depth of the last layer; it grows linearly from 0 at the first.
        initializer_range: standard deviation of new position embeddings and mask tokens.
        image_size, patch_size: an int or (height, width), in pixels.
        stored_patch_size: in a flexible model (FlexiViT, arXiv 2212.08013), the size of the stored kernel; every
            forward resizes the kernel to `patch_size`. None: the model is not flexible.
        position_grid: in a flexible model, (rows, columns) of the stored position embeddings, or an int for a square;
            None: the grid of `image_size`.
        qkv_bias: give query, key and value biases.
        pooling: the head's input: "cls" (the first token), "mean" (of all tokens), "map" (big_vision's attention
            pooling) or "none" (every token).
        use_cls_token: put a class token before the patches; None: with pooling "cls" alone.
        representation_size: width of the tanh pre-logits layer; None: no such layer.
        projection_dim: width of `HfViTModel`'s projection (`image_embeds`), as in the image tower of an image-text
            model; None: no projection.
        position_embedding_type: "learned" (a vector for each token, the paper's 1-D), "learned2d" (a vector of
            hidden_size / 2 for each row and each column), "relative" (1-D relative distances, inside every attention),
            "sincos2d" (fixed, MoCo v3's) or "none".
        position_embedding_placement: add learned ones at the "input" of the encoder; at the input of "every_layer",
            each with its own table; or at "every_layer_shared", all with the same table.
        attention_axes: "all": attention over all tokens. "axial": over the same row in one layer and the same column in
            the next; two layers are one block of the paper's Axial-ViT. It needs an even number of layers and no class
            token, which belongs to no row.
        position_interpolation: how learned position embeddings are resampled for other image sizes: "jax" (bilinear,
            aligned corners), "jax_exact" (the same with the original's rounding error), "bilinear" or "bicubic"
            (half-pixel centers, antialiased, as in timm) or "bicubic_aliased" (not antialiased, as in transformers).
        pool_patches_only: exclude the class token from "mean" and "map" pooling, as timm does.
        norm_after_pooling: apply the final LayerNorm after the pooling (timm's `fc_norm`); `last_hidden_state` is then
            not normalized.
        image_size_history: earlier image sizes of resampled position embeddings, the training size first; None if they
            were never resampled.
        label_thresholds: lowest score at which each class is predicted (multi-label classification), chosen on
            held-out images; None: 0.5.
        temperature: temperature of the calibration by `hf_vit.calibrate`; the head's weights are already divided by it.
        coverage_thresholds: coverage ("0.95") -> lowest probability of a class in the prediction set.
        rejection_thresholds: for each class, the lowest logit at which its prediction is accepted; below it, an
            image shows none of the classes.
        patch_target: target of masked patch prediction: "mean_color" (3 bits per channel), "downsized" (the same for
            each cell of a 4 x 4 grid) or "pixels".

    Raises:
        ValueError: the fields contradict each other (the message has the numbers), or an argument is unknown.

    Example:
        >>> from hf_vit import HfViTConfig
        >>> config = HfViTConfig(image_size=(224, 320), num_hidden_layers=2)
        >>> config.grid_size
        (14, 20)
    """

    model_type = "hf_vit"

    hidden_size: int = count(768, MAX_WIDTH)
    num_hidden_layers: int = count(12, MAX_LAYERS)
    num_attention_heads: int = count(12, MAX_WIDTH)
    intermediate_size: int = count(3072, MAX_WIDTH)
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_dropout_prob: float | int = rate(0.0)
    attention_probs_dropout_prob: float | int = rate(0.0)
    drop_path_rate: float | int = rate(0.0)
    initializer_range: float = amount(0.02)
    layer_norm_eps: float = amount(1e-6)
    image_size: Size = size(224)
    patch_size: Size = size(16)
    num_channels: int = count(3, MAX_WIDTH)
    qkv_bias: bool = True
    pooling: Literal["cls", "mean", "map", "none"] = "cls"
    use_cls_token: bool | None = None
    representation_size: int | None = count(None, MAX_WIDTH)
    projection_dim: int | None = count(None, MAX_WIDTH)
    position_embedding_type: Literal["learned", "sincos2d", "learned2d", "relative", "none"] = "learned"
    position_embedding_placement: Literal["input", "every_layer", "every_layer_shared"] = "input"
    attention_axes: Literal["all", "axial"] = "all"
    position_interpolation: Literal["jax", "jax_exact", "bilinear", "bicubic", "bicubic_aliased"] = "jax"
    pool_patches_only: bool = False
    norm_after_pooling: bool = False
    image_size_history: list[Size] | None = None
    label_thresholds: list[float] | None = None
    temperature: float | None = None
    coverage_thresholds: dict[str, float] | None = None
    rejection_thresholds: list[float] | None = None
    patch_target: Literal["mean_color", "downsized", "pixels"] = "mean_color"
    stored_patch_size: Size | None = size(None)
    position_grid: Size | None = size(None)

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
            name: a key of `VARIANTS`; those with an R (for ResNet) give an `HfViTHybridConfig`.
            overrides: any field of the configuration.

        Raises:
            ValueError: `name` is unknown.
        """
        refuse_unknown("variant", name, VARIANTS)
        width, patch_size, stem_depths = VARIANTS[name]
        sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
        fields: dict[str, Any] = {**dict(zip(sizes, _WIDTHS[width], strict=True)), "patch_size": patch_size}
        if name.endswith("-gap-norep"):
            fields["pooling"] = "mean"
        if stem_depths is None:
            return HfViTConfig(**{**fields, **overrides})
        return HfViTHybridConfig(**{**fields, "stem_depths": list(stem_depths), **overrides})

    def without_projection(self: _Config) -> _Config:
        """Return a copy without a projection, or this configuration if it has none."""
        if self.projection_dim is None:
            return self
        config = copy.copy(self)
        config.projection_dim = None
        return config

    @property
    def output_attentions(self) -> bool:
        """True if every forward returns attentions, unlike in transformers with any attention implementation."""
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
        """Stride of the map that is cut into patches, in image pixels: 1, or that of the ResNet stem."""
        return 1

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches."""
        return int(bool(self.use_cls_token))

    @property
    def adds_positions_to_input(self) -> bool:
        """True if position embeddings are added to the tokens before the first layer, and only there."""
        return self.position_embedding_placement == "input" and self.position_embedding_type not in ("relative", "none")

    @property
    def needs_one_grid(self) -> bool:
        """True if the layers use the positions of patches, so that all images of a batch must have the same shape."""
        return (
            self.position_embedding_placement != "input"
            or self.position_embedding_type == "relative"
            or self.attention_axes == "axial"
        )

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of whole patches at `image_size`; the patches of a flexible model need not divide it."""
        if not self.is_flexible:
            return self.grid_of(*as_pair(self.image_size))
        steps = (patch * self.stride for patch in as_pair(self.patch_size))
        rows, columns = (max(size // step, 1) for size, step in zip(as_pair(self.image_size), steps, strict=True))
        return rows, columns

    @property
    def is_flexible(self) -> bool:
        """True if each forward resizes the stored kernel and position embeddings to the sizes in use."""
        return self.stored_patch_size is not None

    @property
    def kernel_size(self) -> tuple[int, int]:
        """(height, width) of the stored kernel of the patch embedding."""
        return as_pair(self.patch_size if self.stored_patch_size is None else self.stored_patch_size)

    @property
    def stored_grid(self) -> tuple[int, int]:
        """(rows, columns) of the stored position embeddings."""
        return self.grid_size if self.position_grid is None else as_pair(self.position_grid)

    def patches_of(self, patch_size: Size | None) -> tuple[int, int]:
        """Return (height, width) of the patches of a forward.

        Args:
            patch_size: the forward's argument; None: the configuration's.

        Raises:
            ValueError: it is not a size, or the model is not flexible and has another.
        """
        if patch_size is None:
            return as_pair(self.patch_size)
        check_size("patch_size", patch_size)
        if not self.is_flexible and as_pair(patch_size) != as_pair(self.patch_size):
            raise ValueError(
                f"patch_size is {patch_size} (expected {self.patch_size}, the only one of this model); "
                "call make_flexible() or set_patch_size() first"
            )
        height, width = as_pair(patch_size)
        return operator.index(height), operator.index(width)  # plain ints, also under torch.compile

    def grid_of(self, height: int, width: int, patch_size: Size | None = None) -> tuple[int, int]:
        """Return (rows, columns) of the patches of an image.

        Args:
            height, width: in pixels.
            patch_size: as in `patches_of`.

        Raises:
            ValueError: the patches do not divide the image; the message names the nearest sizes that fit.
        """
        grid, patches = [], self.patches_of(patch_size)
        for name, pixels, patch in zip(("height", "width"), (height, width), patches, strict=True):
            map_pixels = -(-pixels // self.stride)  # 'SAME' padding rounds up at every halving
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
        """Check fields together: after construction, and again when a model is built, as fields can change.

        Raises:
            ValueError: two fields contradict each other, or the model is not defined.
        """
        heads, kind, placement = (
            self.num_attention_heads,
            self.position_embedding_type,
            self.position_embedding_placement,
        )
        if self.hidden_size % heads:
            raise ValueError(f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads ({heads})")
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act is {self.hidden_act[:50]!r}; known: {', '.join(sorted(ACT2FN))}")
        if self.position_grid is not None and not self.is_flexible:
            raise ValueError(f"position_grid is {self.position_grid}, which needs stored_patch_size; set both")
        if kind == "sincos2d" and self.hidden_size % 4:
            raise ValueError(f"hidden_size ({self.hidden_size}) is not a multiple of 4, which sincos2d needs")
        if kind == "learned2d" and self.hidden_size % 2:
            raise ValueError(f"hidden_size ({self.hidden_size}) is odd; learned2d halves it between rows and columns")
        if placement != "input" and kind not in ("learned", "learned2d"):
            raise ValueError(f"position_embedding_placement {placement} is for learned and learned2d, not {kind}")
        if self.attention_axes == "axial" and (self.use_cls_token or kind == "relative" or self.num_hidden_layers % 2):
            raise ValueError(
                "axial attention needs use_cls_token=False, an even num_hidden_layers and no relative positions, not "
                f"use_cls_token={self.use_cls_token}, num_hidden_layers={self.num_hidden_layers} and {kind} positions"
            )
        rows, columns = self.grid_size
        if rows * columns > MAX_TOKENS:
            raise ValueError(f"image_size {self.image_size} makes {rows * columns:,} patches; at most {MAX_TOKENS:,}")


def stem_stride(stem_depths: Sequence[int]) -> int:
    """Return the stride of the stem's map in image pixels: 4 after the root, doubled by every stage but the first."""
    return 4 * 2 ** max(len(stem_depths) - 1, 0)


@strict
class HfViTHybridConfig(HfViTConfig):
    r"""A Vision Transformer on the feature map of a ResNet stem (BiT: GroupNorm and standardized weights).

    `patch_size` is in pixels of the stem's feature map, as in the original. Other arguments: see `HfViTConfig`.

    Args:
        stem_depths: units per stage, such as [3, 4, 9]; empty for the root convolution and max-pool alone.
        stem_width: channels of the root convolution, a multiple of 32 (the groups of its GroupNorm).
        group_norm_eps: epsilon of every GroupNorm of the stem.
        weight_standardization_eps: epsilon of its standardized weights.
        weight_standardization_form: add that epsilon to the "std", as in the original, or to the "variance", as in timm
            and transformers.
    """

    model_type = "hf_vit_hybrid"

    patch_size: Size = size(1)
    stem_depths: list[int] | tuple[int, ...] = stages((3, 4, 9))
    stem_width: int = count(64, MAX_WIDTH)
    group_norm_eps: float = amount(1e-6)
    weight_standardization_eps: float = amount(1e-5)
    weight_standardization_form: Literal["std", "variance"] = "std"

    @property
    def stride(self) -> int:
        return stem_stride(self.stem_depths)

    def validate_architecture(self) -> None:
        if self.stem_width % 32:
            raise ValueError(f"stem_width ({self.stem_width}) is not a multiple of 32, the groups of its GroupNorm")
        super().validate_architecture()
