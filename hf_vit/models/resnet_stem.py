"""BiT's ResNets, with GroupNorm and standardized weights: the stem of the hybrids, and the network of `hf_bit`.

There are two kinds of units: post-activation, as in vit_jax/models_resnet.py (google-research/vision_transformer) and
models/bit.py (google-research/big_vision); and pre-activation, as in models/bit_paper.py there and in big_transfer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import conv2d, max_pool2d, pad, relu
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

NUM_GROUPS = 32


class StemNumbers(NamedTuple):
    """Numbers in which ports of this ResNet differ; the defaults are the original's.

    group_norm_eps: timm and transformers have 1e-5.
    standardization_eps, standardization_form: see `standardize`; timm and transformers have 1e-8 and "variance".
    padding: "same", see `_pad_same`; or "fixed", (kernel size - 1) / 2 on every side for any image.
    pool_padding: padding of the max-pool: "lowest" (the dtype's lowest value) or "zero".
    """

    group_norm_eps: float = 1e-6
    standardization_eps: float = 1e-5
    standardization_form: str = "std"
    padding: str = "same"
    pool_padding: str = "lowest"


_ORIGINAL = StemNumbers()


def stem_numbers(config: Any) -> StemNumbers:
    """Return the numbers of an `HfViTHybridConfig` or `HfBiTConfig`; the former has a fixed kind of padding."""
    return StemNumbers(
        config.group_norm_eps,
        config.weight_standardization_eps,
        config.weight_standardization_form,
        getattr(config, "padding", _ORIGINAL.padding),
        getattr(config, "pool_padding", _ORIGINAL.pool_padding),
    )


def _pad_same(images: torch.Tensor, kernel_size: int, stride: int, value: float = 0.0) -> torch.Tensor:
    """Pad as 'SAME' of TensorFlow and JAX: the output has ceil(size / stride), an odd element is added at the end.

    Args:
        images: (batch, channels, height, width)
        kernel_size: 1, or at least the stride.
    """
    if kernel_size == 1:
        return images
    padding = []
    for size in (images.shape[3], images.shape[2]):  # torch pads the last dimension first
        # a branch keeps the symbolic sizes of a compiled model shorter than an expression
        total = kernel_size - (stride if size % stride == 0 else size % stride)
        padding += [total // 2, total - total // 2]
    return pad(images, padding, value=value)


def standardize(weight: torch.Tensor, numbers: StemNumbers = _ORIGINAL) -> torch.Tensor:
    """Compute (weight - mean) / (std + eps) per output channel, with the population's std, in float32 at least.

    With the form "variance" the divisor is sqrt(std ** 2 + eps).

    Args:
        weight: (out_channels, in_channels, height, width)

    Returns:
        The same shape and dtype.
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    std, mean = torch.std_mean(wide, dim=(1, 2, 3), correction=0, keepdim=True)
    eps = numbers.standardization_eps
    divisor = std + eps if numbers.standardization_form == "std" else (std.square() + eps).sqrt()
    return ((wide - mean) / divisor).to(weight.dtype)


class StandardizedConv2d(nn.Conv2d):
    """Convolution with standardized weights and without bias."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int, numbers: StemNumbers):
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, bias=False)
        self.numbers = numbers

    def standardized_weight(self) -> torch.Tensor:
        """Return the standardized weight."""
        return standardize(self.weight, self.numbers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, in_channels, height, width) -> (batch, out_channels, rows, columns)"""
        return convolve(images, self.standardized_weight(), self.stride[0], self.numbers.padding)


def convolve(images: torch.Tensor, weight: torch.Tensor, stride: int, padding: str) -> torch.Tensor:
    """Convolve with a weight that is standardized already; `padding` is a kind of `StemNumbers`."""
    kernel_size = weight.shape[2]
    if padding == "fixed":
        return conv2d(images, weight, stride=stride, padding=(kernel_size - 1) // 2)
    return conv2d(_pad_same(images, kernel_size, stride), weight, stride=stride)


class GroupNorm(nn.GroupNorm):
    """GroupNorm with 32 groups."""

    def __init__(self, num_channels: int, numbers: StemNumbers):
        super().__init__(NUM_GROUPS, num_channels, eps=numbers.group_norm_eps)


class LastGroupNorm(GroupNorm):
    """Last norm of a post-activation unit, initialized with zeros, so that a new unit starts as the identity."""

    def initialize(self) -> None:
        """Set the weights to zero."""
        init.zeros_(self.weight)


class Downsample(nn.Module):
    """Projection of the residual where a unit changes the shape; normalized only in post-activation units."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, numbers: StemNumbers, has_norm: bool = True):
        super().__init__()
        self.conv = StandardizedConv2d(in_channels, out_channels, 1, stride, numbers)
        self.norm = GroupNorm(out_channels, numbers) if has_norm else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(images))


class BottleneckUnit(GradientCheckpointingLayer):
    """Post-activation unit: 1x1, 3x3 (with the stride) and 1x1 convolution, each with GroupNorm; ReLU after the sum."""

    def __init__(self, in_channels: int, channels: int, stride: int, numbers: StemNumbers):
        super().__init__()
        out_channels = 4 * channels
        self.conv1 = StandardizedConv2d(in_channels, channels, 1, 1, numbers)
        self.norm1 = GroupNorm(channels, numbers)
        self.conv2 = StandardizedConv2d(channels, channels, 3, stride, numbers)
        self.norm2 = GroupNorm(channels, numbers)
        self.conv3 = StandardizedConv2d(channels, out_channels, 1, 1, numbers)
        self.norm3 = LastGroupNorm(out_channels, numbers)
        self.downsample = nn.Identity()
        if in_channels != out_channels or stride != 1:
            self.downsample = Downsample(in_channels, out_channels, stride, numbers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = relu(self.norm1(self.conv1(images)))
        hidden = relu(self.norm2(self.conv2(hidden)))
        return relu(self.downsample(images) + self.norm3(self.conv3(hidden)))


class PreActivationUnit(GradientCheckpointingLayer):
    """Pre-activation unit (arXiv 1603.05027): GroupNorm and ReLU before each convolution; the 3x3 has the stride."""

    def __init__(self, in_channels: int, channels: int, stride: int, numbers: StemNumbers):
        super().__init__()
        out_channels = 4 * channels
        self.norm1 = GroupNorm(in_channels, numbers)
        self.conv1 = StandardizedConv2d(in_channels, channels, 1, 1, numbers)
        self.norm2 = GroupNorm(channels, numbers)
        self.conv2 = StandardizedConv2d(channels, channels, 3, stride, numbers)
        self.norm3 = GroupNorm(channels, numbers)
        self.conv3 = StandardizedConv2d(channels, out_channels, 1, 1, numbers)
        self.downsample = None
        if in_channels != out_channels or stride != 1:
            self.downsample = Downsample(in_channels, out_channels, stride, numbers, has_norm=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        activated = relu(self.norm1(images))
        residual = images if self.downsample is None else self.downsample(activated)
        hidden = self.conv1(activated)
        hidden = self.conv2(relu(self.norm2(hidden)))
        return residual + self.conv3(relu(self.norm3(hidden)))


# By their names in transformers' BitConfig.
_UNITS: dict[str, type[nn.Module]] = {"bottleneck": BottleneckUnit, "preactivation": PreActivationUnit}


class ResNetStage(nn.Module):
    """Units of the same width; the first has the stride."""

    def __init__(
        self,
        in_channels: int,
        channels: int,
        depth: int,
        stride: int,
        numbers: StemNumbers,
        unit: type[nn.Module] = BottleneckUnit,
    ):
        super().__init__()
        self.layers = nn.Sequential(
            unit(in_channels, channels, stride, numbers),
            *(unit(4 * channels, channels, 1, numbers) for _ in range(depth - 1)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class ResNetStem(nn.Module):
    """Root convolution and max-pool (stride 4), then the stages; each but the first halves the map.

    Args:
        num_channels: number of image channels.
        width: channels of the root; stage s (from 0) has 4 * width * 2 ** s at its output.
        depths: units per stage.
        numbers: those of the code that trained the weights.
        layer_type: a key of `_UNITS`; with "preactivation" the root has no norm.
    """

    def __init__(
        self,
        num_channels: int,
        width: int,
        depths: Sequence[int],
        numbers: StemNumbers = _ORIGINAL,
        layer_type: str = "bottleneck",
    ):
        super().__init__()
        self.numbers = numbers
        self.convolution = StandardizedConv2d(num_channels, width, 7, 2, numbers)
        self.norm = GroupNorm(width, numbers) if layer_type == "bottleneck" else None
        self.stages = nn.Sequential()
        self.out_channels = width
        for index, depth in enumerate(depths):
            channels, stride = width * 2**index, 1 if index == 0 else 2
            self.stages.append(ResNetStage(self.out_channels, channels, depth, stride, numbers, _UNITS[layer_type]))
            self.out_channels = 4 * channels

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, num_channels, height, width) -> (batch, out_channels, ceil(height / stride), ceil(width / stride))"""
        return self.stages(self.root(pixel_values))

    def root(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, num_channels, height, width) -> (batch, width of the root, ceil(height / 4), ceil(width / 4))"""
        hidden = self.convolution(pixel_values)
        hidden = hidden if self.norm is None else relu(self.norm(hidden))
        # ONNX Runtime (1.31) treats zeros before a max-pool as no padding
        is_exported = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - is public
        zero = 1e-30 if is_exported else 0.0
        value = zero if self.numbers.pool_padding == "zero" else float("-inf")
        if self.numbers.padding == "fixed":  # at odd sizes the same as 'SAME', at even sizes shifted by one pixel
            hidden = pad(hidden, [1, 1, 1, 1], value=value)
        else:
            hidden = _pad_same(hidden, 3, 2, value)
        return max_pool2d(hidden, 3, stride=2)
