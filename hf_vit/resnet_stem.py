"""The ResNet in front of the hybrids: BiT's ResNet with GroupNorm and standardised weights, post-activation.

Numbers and padding are those of vit_jax/models_resnet.py and models_vit.py, google-research/vision_transformer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import conv2d, max_pool2d, pad, relu

NUM_GROUPS = 32


class StemNumbers(NamedTuple):
    """In what ports of this ResNet differ; the defaults are the original's.

    group_norm_eps: timm and transformers have 1e-5.
    standardization_eps, standardization_form: see `standardize`; timm and transformers have 1e-8 and "variance".
    """

    group_norm_eps: float = 1e-6
    standardization_eps: float = 1e-5
    standardization_form: str = "std"


ORIGINAL = StemNumbers()


def pad_same(images: torch.Tensor, kernel_size: int, stride: int, value: float = 0.0) -> torch.Tensor:
    """'SAME' padding of TensorFlow and JAX: the output is ceil(size / stride), the odd element goes after.

    Args:
        images: (batch, channels, height, width)
        kernel_size: 1, or at least the stride.
    """
    if kernel_size == 1:
        return images
    padding = []
    for size in (images.shape[3], images.shape[2]):  # torch pads the last dimension first
        # a branch, not an expression: it keeps the symbolic sizes of a compiled model short
        total = kernel_size - (stride if size % stride == 0 else size % stride)
        padding += [total // 2, total - total // 2]
    return pad(images, padding, value=value)


def standardize(weight: torch.Tensor, numbers: StemNumbers = ORIGINAL) -> torch.Tensor:
    """(weight - mean) / (std + eps) per output channel, with the population's standard deviation, in float32 at least.

    With the form "variance" the divisor is sqrt(std ** 2 + eps).

    Args:
        weight: (out_channels, in_channels, height, width)
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    std, mean = torch.std_mean(wide, dim=(1, 2, 3), correction=0, keepdim=True)
    eps = numbers.standardization_eps
    divisor = std + eps if numbers.standardization_form == "std" else (std.square() + eps).sqrt()
    return ((wide - mean) / divisor).to(weight.dtype)


class StandardizedConv2d(nn.Conv2d):
    """Convolution without bias, with standardised weights and 'SAME' padding."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int, numbers: StemNumbers):
        super().__init__(in_channels, out_channels, kernel_size, stride=stride, bias=False)
        self.numbers = numbers

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = pad_same(images, self.kernel_size[0], self.stride[0])
        return conv2d(images, standardize(self.weight, self.numbers), stride=self.stride)


class GroupNorm(nn.GroupNorm):
    def __init__(self, num_channels: int, numbers: StemNumbers):
        super().__init__(NUM_GROUPS, num_channels, eps=numbers.group_norm_eps)


class Downsample(nn.Module):
    """Projection of the residual where a unit changes the shape."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, numbers: StemNumbers):
        super().__init__()
        self.conv = StandardizedConv2d(in_channels, out_channels, 1, stride, numbers)
        self.norm = GroupNorm(out_channels, numbers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(images))


class BottleneckUnit(nn.Module):
    """1x1, 3x3 (with the stride), 1x1 convolution, each with GroupNorm; one ReLU after the residual sum."""

    def __init__(self, in_channels: int, channels: int, stride: int, numbers: StemNumbers):
        super().__init__()
        out_channels = 4 * channels
        self.conv1 = StandardizedConv2d(in_channels, channels, 1, 1, numbers)
        self.norm1 = GroupNorm(channels, numbers)
        self.conv2 = StandardizedConv2d(channels, channels, 3, stride, numbers)
        self.norm2 = GroupNorm(channels, numbers)
        self.conv3 = StandardizedConv2d(channels, out_channels, 1, 1, numbers)
        self.norm3 = GroupNorm(out_channels, numbers)
        self.downsample = nn.Identity()
        if in_channels != out_channels or stride != 1:
            self.downsample = Downsample(in_channels, out_channels, stride, numbers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = relu(self.norm1(self.conv1(images)))
        hidden = relu(self.norm2(self.conv2(hidden)))
        return relu(self.downsample(images) + self.norm3(self.conv3(hidden)))


class ResNetStage(nn.Module):
    def __init__(self, in_channels: int, channels: int, depth: int, stride: int, numbers: StemNumbers):
        super().__init__()
        self.layers = nn.Sequential(
            BottleneckUnit(in_channels, channels, stride, numbers),
            *(BottleneckUnit(4 * channels, channels, 1, numbers) for _ in range(depth - 1)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class ResNetStem(nn.Module):
    """Root convolution and max-pool (stride 4), then the stages, each but the first halving the map.

    Args:
        num_channels: of the images.
        width: channels of the root; stage s has 4 * width * 2 ** s at its output.
        depths: units per stage.
        numbers: those of the code that trained the weights.
    """

    def __init__(self, num_channels: int, width: int, depths: Sequence[int], numbers: StemNumbers = ORIGINAL):
        super().__init__()
        self.convolution = StandardizedConv2d(num_channels, width, 7, 2, numbers)
        self.norm = GroupNorm(width, numbers)
        self.stages = nn.Sequential()
        self.out_channels = width
        for index, depth in enumerate(depths):
            channels, stride = width * 2**index, 1 if index == 0 else 2
            self.stages.append(ResNetStage(self.out_channels, channels, depth, stride, numbers))
            self.out_channels = 4 * channels

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, num_channels, height, width) -> (batch, out_channels, ceil(height / stride), ceil(width / stride))"""
        return self.stages(self.root(pixel_values))

    def root(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden = relu(self.norm(self.convolution(pixel_values)))
        return max_pool2d(pad_same(hidden, 3, 2, value=float("-inf")), 3, stride=2)
