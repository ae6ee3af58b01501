"""Configuration of the BiT ResNets (arXiv 1912.11370), the ViT paper's convolutional baselines."""

from typing import Any, Literal

from .configuration_hf_vit import HfVisionConfig
from .sizes import MAX_WIDTH, Size, check_choice, float_field, int_field, size_field, stages_field, strict

NUM_GROUPS = 32
# Number of layers -> residual units per stage (get_block_desc in big_vision's models/bit.py).
DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
# The models of the ViT paper (Tables 3 and 6) and the BiT paper: number of layers, and width factor.
_LAYERS_AND_FACTORS = ((50, 1), (50, 2), (50, 3), (101, 1), (101, 3), (152, 1), (152, 2), (152, 4), (200, 3))
VARIANTS = {f"R{layers}x{factor}": (layers, factor) for layers, factor in _LAYERS_AND_FACTORS}
# Options of the original implementations. big_vision's bit_paper.py reads big_transfer's files, but its max-pool
# ignores the border, where big_transfer pads with zeros.
BIG_TRANSFER: dict[str, Any] = {
    "layer_type": "preactivation",
    "group_norm_eps": 1e-5,
    "weight_standardization_eps": 1e-10,
    "weight_standardization_form": "variance",
    "padding": "fixed",
    "pool_padding": "zero",
}
ORIGINALS: dict[str, dict[str, Any]] = {
    "big_transfer": BIG_TRANSFER,
    "bit_paper": {**BIG_TRANSFER, "pool_padding": "lowest"},
    "bit": {
        "layer_type": "bottleneck",
        "group_norm_eps": 1e-6,
        "weight_standardization_eps": 1e-5,
        "weight_standardization_form": "std",
        "padding": "same",
        "pool_padding": "lowest",
    },
}


@strict
class HfBiTConfig(HfVisionConfig):
    r"""Configuration of a ResNet with GroupNorm and weight standardization (Big Transfer, arXiv 1912.11370).

    Fields that transformers' `BitConfig` also has have the same names. The defaults are BiT-R50x1 with the options of
    google-research/big_transfer.

    Args:
        num_channels: number of image channels.
        embedding_size: channels of the root convolution, a multiple of 32; the output of stage s (from 1) has
            4 * embedding_size * 2 ** (s - 1) channels.
        depths: residual units per stage.
        layer_type: "preactivation" (ResNet-v2, as in BiT) or "bottleneck" (ResNet-v1, as in big_vision's bit.py).
        image_size: size of the images at evaluation, an int or (height, width) in pixels; other sizes work too.
        group_norm_eps: epsilon of every GroupNorm.
        weight_standardization_eps: epsilon of the weight standardization.
        weight_standardization_form: what this epsilon is added to, the "variance" or the "std".
        padding: padding of the convolutions: "fixed" (3 pixels around the image, 1 around every 3x3 convolution) or
            "same" (as in TensorFlow, where it depends on the size).
        pool_padding: padding of the max-pool after the root: "zero", or "lowest" (minus infinity).
        spatial_mixing: "convolution"; or "axial_attention", which replaces every 3x3 convolution (AxialResNet), needs
            layer_type "bottleneck" and works for images of at most `image_size`.
        label_thresholds: for multi-label classification, the lowest score at which each class is predicted, chosen on
            held-out images; None: 0.5.
        temperature: temperature fitted by `hf_vit.calibrate`, by which the head's weights are already divided.
        coverage_thresholds: coverage, such as "0.95" -> the lowest probability at which a class is in the prediction
            set (conformal prediction).
        rejection_thresholds: for each class, the lowest logit at which a prediction of this class is accepted. Images
            with a lower logit are rejected, because they probably show none of the classes.
        head_init: weights of a new classification head: "zeros", as in the papers, or "normal".
        initializer_range: standard deviation of the weights of a head with head_init "normal".

    Raises:
        ValueError: fields contradict each other, or an argument is unknown.
    """

    model_type = "hf_bit"

    num_channels: int = int_field(3, MAX_WIDTH)
    embedding_size: int = int_field(64, MAX_WIDTH)
    depths: list[int] | tuple[int, ...] = stages_field(DEPTHS[50])
    layer_type: Literal["preactivation", "bottleneck"] = "preactivation"
    image_size: Size = size_field(224)
    group_norm_eps: float = float_field(1e-5)
    weight_standardization_eps: float = float_field(1e-10)
    weight_standardization_form: Literal["variance", "std"] = "variance"
    padding: Literal["fixed", "same"] = "fixed"
    pool_padding: Literal["zero", "lowest"] = "zero"
    spatial_mixing: Literal["convolution", "axial_attention"] = "convolution"
    initializer_range: float = float_field(0.02)

    def __post_init__(self, **kwargs):
        self.depths = list(self.depths)
        super().__post_init__(**kwargs)

    @classmethod
    def from_variant(cls, name: str, /, original: str = "big_transfer", **overrides) -> "HfBiTConfig":
        """Return the configuration of a published model, e.g. `from_variant("R50x1", image_size=480)`.

        Args:
            name: a key of `VARIANTS`.
            original: the implementation whose options to use, a key of `ORIGINALS`.
            overrides: values for any fields of the configuration.

        Raises:
            ValueError: `name` or `original` is unknown.
        """
        check_choice("variant", name, VARIANTS)
        check_choice("original", original, ORIGINALS)
        layers, factor = VARIANTS[name]
        return cls(**{**ORIGINALS[original], "depths": DEPTHS[layers], "embedding_size": 64 * factor, **overrides})

    @property
    def hidden_sizes(self) -> list[int]:
        """Number of output channels of each stage."""
        return [4 * self.embedding_size * 2**stage for stage in range(len(self.depths))]

    @property
    def hidden_size(self) -> int:
        """Number of input features of the head."""
        return self.hidden_sizes[-1]

    @property
    def stage_names(self) -> list[str]:
        """Names for a backbone's `out_features`: the root, then the stages."""
        return ["stem"] + [f"stage{number}" for number in range(1, len(self.depths) + 1)]

    @property
    def stride(self) -> int:
        """Stride of the last feature map, in image pixels."""
        return 2 ** (len(self.depths) + 1)

    def validate_architecture(self) -> None:
        """Check combinations of fields; called after construction, and again when a model is built.

        Raises:
            ValueError: there is no stage, or fields contradict each other.
        """
        if not self.depths:
            raise ValueError("depths is empty; expected one stage or more")
        if self.embedding_size % NUM_GROUPS:
            raise ValueError(f"embedding_size ({self.embedding_size}) is not a multiple of {NUM_GROUPS} (of GroupNorm)")
        if self.spatial_mixing == "axial_attention" and self.layer_type != "bottleneck":
            raise ValueError(f"layer_type is {self.layer_type!r}, but axial attention needs 'bottleneck'")
