"""BiT's ResNet with GroupNorm and weight standardization, for the stem of the hybrids and for the BiT models.

There are two types of residual units: post-activation, as in google-research/vision_transformer
(vit_jax/models_resnet.py) and google-research/big_vision (models/bit.py); and pre-activation, as in big_vision's
models/bit_paper.py and google-research/big_transfer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import conv2d, max_pool2d, pad, relu
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

NUM_GROUPS = 32


def _pad_same(images: torch.Tensor, kernel_size: int, stride: int, value: float = 0.0) -> torch.Tensor:
    """Pad images like 'SAME' in TensorFlow and JAX.

    The output of the convolution has ceil(size / stride) pixels. If the padding is odd, the end gets the extra pixel.

    Args:
        images: (batch, channels, height, width)
        kernel_size: 1, or at least the stride.
    """
    if kernel_size == 1:
        return images
    padding = []
    for size in (images.shape[3], images.shape[2]):  # torch pads the last dimension first
        # a branch on the size makes simpler symbolic shapes under torch.compile than an expression
        total = kernel_size - (stride if size % stride == 0 else size % stride)
        padding += [total // 2, total - total // 2]
    return pad(images, padding, value=value)


def standardize(weight: torch.Tensor, config: Any) -> torch.Tensor:
    """Standardize a weight: (weight - mean) / (std + eps) for each output channel, with the population std.

    With `weight_standardization_form` "variance", the divisor is sqrt(std ** 2 + eps). The computation is in float32,
    or in float64 for a float64 weight.

    Args:
        weight: (out_channels, in_channels, height, width)
        config: an `HfViTHybridConfig` or `HfBiTConfig`.

    Returns:
        A tensor of the same shape and dtype.
    """
    values = weight.to(torch.promote_types(weight.dtype, torch.float32))
    std, mean = torch.std_mean(values, dim=(1, 2, 3), correction=0, keepdim=True)
    eps = config.weight_standardization_eps
    divisor = std + eps if config.weight_standardization_form == "std" else (std.square() + eps).sqrt()
    return ((values - mean) / divisor).to(weight.dtype)


class StandardizedConv2d(nn.Conv2d):
    """Convolution with weight standardization and without bias.

    Raises:
        ValueError: PEFT builds it, with other arguments, for a low-rank adapter.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int, config: Any, **of_adapter: Any
    ):
        if of_adapter:
            raise ValueError(
                "a convolution with weight standardization takes no low-rank adapter: merged into the weight, it would "
                "be standardized too; adapt other layers, or train whole layers (modules_to_save)"
            )
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, bias=False)
        self.config = config

    def standardized_weight(self) -> torch.Tensor:
        """Return the standardized weight, (out_channels, in_channels, kernel_size, kernel_size)."""
        return standardize(self.weight, self.config)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, in_channels, height, width) -> (batch, out_channels, rows, columns)"""
        return convolve(images, self.standardized_weight(), self.stride[0], self.config.padding)


def convolve(images: torch.Tensor, weight: torch.Tensor, stride: int, padding: str) -> torch.Tensor:
    """Convolve images with a standardized weight; `padding` is "same" or "fixed"."""
    kernel_size = weight.shape[2]
    if padding == "fixed":
        return conv2d(images, weight, stride=stride, padding=(kernel_size - 1) // 2)
    return conv2d(_pad_same(images, kernel_size, stride), weight, stride=stride)


class GroupNorm(nn.GroupNorm):
    """GroupNorm with 32 groups."""

    def __init__(self, num_channels: int, config: Any):
        super().__init__(NUM_GROUPS, num_channels, eps=config.group_norm_eps)


class LastGroupNorm(GroupNorm):
    """Last norm of a post-activation unit; its scale starts at zero, so that the residual branch starts at zero."""

    def initialize(self) -> None:
        """Set the scale to zero."""
        init.zeros_(self.weight)


class Downsample(nn.Module):
    """Projection shortcut of a unit that changes the shape; only post-activation units normalize it."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, config: Any, has_norm: bool = True):
        super().__init__()
        self.conv = StandardizedConv2d(in_channels, out_channels, 1, stride, config)
        self.norm = GroupNorm(out_channels, config) if has_norm else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(images))


class BottleneckUnit(GradientCheckpointingLayer):
    """Post-activation unit: 1x1, 3x3 (strided) and 1x1 convolutions, each with GroupNorm; ReLU after the sum."""

    def __init__(self, in_channels: int, channels: int, stride: int, config: Any):
        super().__init__()
        out_channels = 4 * channels
        self.conv1 = StandardizedConv2d(in_channels, channels, 1, 1, config)
        self.norm1 = GroupNorm(channels, config)
        self.conv2 = StandardizedConv2d(channels, channels, 3, stride, config)
        self.norm2 = GroupNorm(channels, config)
        self.conv3 = StandardizedConv2d(channels, out_channels, 1, 1, config)
        self.norm3 = LastGroupNorm(out_channels, config)
        self.downsample = nn.Identity()
        if in_channels != out_channels or stride != 1:
            self.downsample = Downsample(in_channels, out_channels, stride, config)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = relu(self.norm1(self.conv1(images)))
        hidden = relu(self.norm2(self.conv2(hidden)))
        return relu(self.downsample(images) + self.norm3(self.conv3(hidden)))


class PreActivationUnit(GradientCheckpointingLayer):
    """Pre-activation unit (arXiv 1603.05027): GroupNorm and ReLU before each convolution; the 3x3 one is strided."""

    def __init__(self, in_channels: int, channels: int, stride: int, config: Any):
        super().__init__()
        out_channels = 4 * channels
        self.norm1 = GroupNorm(in_channels, config)
        self.conv1 = StandardizedConv2d(in_channels, channels, 1, 1, config)
        self.norm2 = GroupNorm(channels, config)
        self.conv2 = StandardizedConv2d(channels, channels, 3, stride, config)
        self.norm3 = GroupNorm(channels, config)
        self.conv3 = StandardizedConv2d(channels, out_channels, 1, 1, config)
        self.downsample = None
        if in_channels != out_channels or stride != 1:
            self.downsample = Downsample(in_channels, out_channels, stride, config, has_norm=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        activated = relu(self.norm1(images))
        residual = images if self.downsample is None else self.downsample(activated)
        hidden = self.conv1(activated)
        hidden = self.conv2(relu(self.norm2(hidden)))
        return residual + self.conv3(relu(self.norm3(hidden)))


# Keys are those of `layer_type` in transformers' BitConfig.
_UNITS: dict[str, type[nn.Module]] = {"bottleneck": BottleneckUnit, "preactivation": PreActivationUnit}


class ResNetStage(nn.Module):
    """Residual units of the same width; the first one is strided."""

    def __init__(self, in_channels: int, channels: int, depth: int, stride: int, config: Any):
        super().__init__()
        unit = _UNITS[config.layer_type]
        self.layers = nn.Sequential(
            unit(in_channels, channels, stride, config),
            *(unit(4 * channels, channels, 1, config) for _ in range(depth - 1)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class ResNetStem(nn.Module):
    """Root convolution and max-pool (stride 4), then the stages; each stage except the first has stride 2.

    Args:
        config: an `HfViTHybridConfig` or `HfBiTConfig`; with its `layer_type` "preactivation", the root has no norm.
        width: channels of the root convolution; the output of stage s (from 0) has 4 * width * 2 ** s channels.
        depths: residual units per stage.
    """

    def __init__(self, config: Any, width: int, depths: Sequence[int]):
        super().__init__()
        self.config = config
        self.convolution = StandardizedConv2d(config.num_channels, width, 7, 2, config)
        self.norm = GroupNorm(width, config) if config.layer_type == "bottleneck" else None
        self.stages = nn.Sequential()
        self.out_channels = width
        for index, depth in enumerate(depths):
            channels = width * 2**index
            stride = 1 if index == 0 else 2
            self.stages.append(ResNetStage(self.out_channels, channels, depth, stride, config))
            self.out_channels = 4 * channels

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, num_channels, height, width) -> (batch, out_channels, ceil(height / stride), ceil(width / stride))"""
        return self.stages(self.root(pixel_values))

    def root(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, num_channels, height, width) -> (batch, root channels, ceil(height / 4), ceil(width / 4))"""
        hidden = self.convolution(pixel_values)
        hidden = hidden if self.norm is None else relu(self.norm(hidden))
        # ONNX Runtime 1.31 ignores padding with zeros before a max-pool
        is_exported = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - it is public
        zero = 1e-30 if is_exported else 0.0
        value = zero if self.config.pool_padding == "zero" else float("-inf")
        if self.config.padding == "fixed":  # equal to 'SAME' for odd sizes, shifted by one pixel for even sizes
            hidden = pad(hidden, [1, 1, 1, 1], value=value)
        else:
            hidden = _pad_same(hidden, 3, 2, value)
        return max_pool2d(hidden, 3, stride=2)
