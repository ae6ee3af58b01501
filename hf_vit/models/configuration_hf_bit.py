"""Configuration of the BiT ResNets (arXiv 1912.11370), the convolutional networks that the ViT paper compares with."""

from typing import Any, Literal

from .configuration_hf_vision import (
    MAX_WIDTH,
    HfVisionConfig,
    Size,
    amount,
    count,
    refuse_unknown,
    size,
    stages,
    strict,
)

NUM_GROUPS = 32
# Units per stage of a ResNet of so many layers (get_block_desc of big_vision's models/bit.py).
DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
# The models of the ViT paper (Tables 3 and 6) and of the BiT paper: layers, and the width as a multiple of ResNet-50's.
VARIANTS = {
    "R50x1": (50, 1),
    "R50x2": (50, 2),
    "R50x3": (50, 3),
    "R101x1": (101, 1),
    "R101x3": (101, 3),
    "R152x1": (152, 1),
    "R152x2": (152, 2),
    "R152x4": (152, 4),
    "R200x3": (200, 3),
}
# Numbers of the original implementations. bit_paper.py of big_vision reads the files of big_transfer, but its max-pool
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
    r"""A ResNet with GroupNorm and standardized weights (Big Transfer, arXiv 1912.11370).

    Fields have the names of transformers' `BitConfig` where it has them too. The defaults are a BiT-R50x1 with the
    numbers of google-research/big_transfer.

    Args:
        num_channels: number of image channels.
        embedding_size: channels of the root convolution, a multiple of 32; stage s (from 1) has
            4 * embedding_size * 2 ** (s - 1) at its output.
        depths: units per stage.
        layer_type: "preactivation" (ResNet-v2, BiT's) or "bottleneck" (ResNet-v1, that of big_vision's bit.py).
        image_size: size at which the weights are evaluated, an int or (height, width) in pixels; others work too.
        group_norm_eps: epsilon of every GroupNorm.
        weight_standardization_eps: epsilon of the standardized weights.
        weight_standardization_form: add that epsilon to the "variance" or to the "std".
        padding: padding of the convolutions: "fixed" (3 pixels around the image, 1 around every 3x3 convolution) or
            "same" (TensorFlow's, which depends on the size).
        pool_padding: padding of the max-pool after the root: "zero", or "lowest" (the dtype's lowest value).
        spatial_mixing: "convolution", or "axial_attention" in place of every 3x3 convolution (AxialResNet; needs
            "bottleneck"). The relative positions of axial attention allow images of at most `image_size`.
        label_thresholds: lowest score at which each class is predicted (multi-label classification), chosen on
            held-out images; None: 0.5.
        temperature: temperature of the calibration by `hf_vit.calibrate`; the head's weights are already divided by it.
        coverage_thresholds: coverage ("0.95") -> lowest probability of a class in the prediction set.
        rejection_thresholds: for each class, the lowest logit at which its prediction is accepted; below it, an
            image shows none of the classes.

    Raises:
        ValueError: the fields contradict each other, or an argument is unknown.
    """

    model_type = "hf_bit"

    num_channels: int = count(3, MAX_WIDTH)
    embedding_size: int = count(64, MAX_WIDTH)
    depths: list[int] | tuple[int, ...] = stages(DEPTHS[50])
    layer_type: Literal["preactivation", "bottleneck"] = "preactivation"
    image_size: Size = size(224)
    group_norm_eps: float = amount(1e-5)
    weight_standardization_eps: float = amount(1e-10)
    weight_standardization_form: Literal["variance", "std"] = "variance"
    padding: Literal["fixed", "same"] = "fixed"
    pool_padding: Literal["zero", "lowest"] = "zero"
    spatial_mixing: Literal["convolution", "axial_attention"] = "convolution"
    label_thresholds: list[float] | None = None
    temperature: float | None = None
    coverage_thresholds: dict[str, float] | None = None
    rejection_thresholds: list[float] | None = None

    def __post_init__(self, **kwargs):
        self.depths = list(self.depths)
        super().__post_init__(**kwargs)

    @classmethod
    def from_variant(cls, name: str, /, original: str = "big_transfer", **overrides) -> "HfBiTConfig":
        """Return the configuration of a published model, e.g. `from_variant("R50x1", image_size=480)`.

        Args:
            name: a key of `VARIANTS`.
            original: the implementation to take the numbers from, a key of `ORIGINALS`.
            overrides: any field of the configuration.

        Raises:
            ValueError: `name` or `original` is unknown.
        """
        refuse_unknown("variant", name, VARIANTS)
        refuse_unknown("original", original, ORIGINALS)
        layers, factor = VARIANTS[name]
        return cls(**{**ORIGINALS[original], "depths": DEPTHS[layers], "embedding_size": 64 * factor, **overrides})

    @property
    def hidden_sizes(self) -> list[int]:
        """Channels at the output of each stage."""
        return [4 * self.embedding_size * 2**stage for stage in range(len(self.depths))]

    @property
    def hidden_size(self) -> int:
        """Number of channels at the head's input."""
        return self.hidden_sizes[-1]

    @property
    def stage_names(self) -> list[str]:
        """Names for a backbone's `out_features`: the root, then the stages."""
        return ["stem"] + [f"stage{number}" for number in range(1, len(self.depths) + 1)]

    @property
    def stride(self) -> int:
        """Image pixels per pixel of the last map."""
        return 2 ** (len(self.depths) + 1)

    def validate_architecture(self) -> None:
        """Check fields together: after construction, and again when a model is built, as fields can change.

        Raises:
            ValueError: there is no stage, or two fields contradict each other.
        """
        if not self.depths:
            raise ValueError("depths is empty; expected one stage or more")
        if self.embedding_size % NUM_GROUPS:
            raise ValueError(
                f"embedding_size ({self.embedding_size}) is not a multiple of {NUM_GROUPS}, the groups of its GroupNorm"
            )
        if self.spatial_mixing == "axial_attention" and self.layer_type != "bottleneck":
            raise ValueError(f"layer_type is {self.layer_type!r}; axial attention needs units of type 'bottleneck'")
