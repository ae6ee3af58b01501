"""AxialResNet (arXiv 2003.07853): axial attention in place of the 3x3 convolutions of a ResNet.

Section D.6 of arXiv 2010.11929 compares ViT with this network. The formulas are those of csrhddlam/axial-deeplab, but
with GroupNorm instead of BatchNorm, as in the paper's other ResNets.
"""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from .configuration_hf_bit import HfBiTConfig
from .resnet_stem import NUM_GROUPS, ResNetStem
from .sizes import as_pair

NUM_HEADS = 8  # called "groups" in axial-deeplab


class AxialAttention(nn.Module):
    """Attention along one axis of a feature map, with relative positions for queries, keys and values.

    Along each line (a row or column), with d = i - j:

        logits[i, j] = norm(q_i . k_j) + norm(q_i . positions_q[d]) + norm(k_j . positions_k[-d])
        output[i] = norm(sum_j p[i, j] v_j) + norm(sum_j p[i, j] positions_v[d]),  p = softmax of the logits over j

    Queries and keys have half as many channels as values. All heads share the positions.

    Args:
        channels: number of channels of the feature map, a multiple of 16.
        span: maximum length of a line; there are positions for 2 * span - 1 distances.
        along_columns: attend along columns instead of rows.
        eps: epsilon of every GroupNorm.
    """

    def __init__(self, channels: int, span: int, along_columns: bool, eps: float):
        super().__init__()
        self.span = span
        self.along_columns = along_columns
        self.sizes = [channels // NUM_HEADS // 2, channels // NUM_HEADS // 2, channels // NUM_HEADS]
        self.qkv = nn.Conv2d(channels, 2 * channels, 1, bias=False)
        self.positions = nn.Parameter(torch.empty(sum(self.sizes), 2 * span - 1))
        self.norm_qkv = nn.GroupNorm(NUM_GROUPS, 2 * channels, eps)
        self.norm_logits = nn.GroupNorm(3 * NUM_HEADS, 3 * NUM_HEADS, eps)
        self.norm_output = nn.GroupNorm(NUM_GROUPS, 2 * channels, eps)

    def initialize(self) -> None:
        """Initialize the positions as in axial-deeplab."""
        init.normal_(self.positions, std=self.sizes[-1] ** -0.5)

    def forward(self, feature_map: torch.Tensor) -> torch.Tensor:
        """(batch, channels, rows, columns) -> the same.

        Raises:
            ValueError: a line of the feature map is longer than `span`.
        """
        lines = feature_map.transpose(2, 3) if self.along_columns else feature_map  # (batch, channels, lines, length)
        if lines.shape[3] > self.span:
            raise ValueError(f"axial attention covers {self.span} positions, not {lines.shape[3]}: use smaller images")
        qkv = self.norm_qkv(self.qkv(lines)).unflatten(1, (NUM_HEADS, -1))
        query, key, value = qkv.split(self.sizes, dim=2)  # (batch, heads, head_dim, lines, length)
        index = torch.arange(lines.shape[3], device=lines.device)
        positions = self.positions[:, index[:, None] - index + self.span - 1]  # [:, i, j]: distance i - j
        to_query, to_key, to_value = positions.split(self.sizes)
        logits = (
            torch.einsum("bhcli,bhclj->bhlij", query, key),
            torch.einsum("bhcli,cij->bhlij", query, to_query),
            torch.einsum("bhclj,cji->bhlij", key, to_key),
        )
        summands = self.norm_logits(torch.cat(logits, dim=1)).unflatten(1, (3, NUM_HEADS))
        probabilities = summands.sum(dim=1).softmax(dim=-1).to(value.dtype)  # (batch, heads, lines, length, length)
        attended = (
            torch.einsum("bhlij,bhclj->bhcli", probabilities, value),
            torch.einsum("bhlij,cij->bhcli", probabilities, to_value),
        )
        output = self.norm_output(torch.stack(attended, dim=3).flatten(1, 3))  # 2 * channels
        output = output.unflatten(1, (-1, 2)).sum(dim=2)
        return output.transpose(2, 3) if self.along_columns else output


def replace_convolutions(resnet: ResNetStem, config: HfBiTConfig) -> None:
    """Replace every 3x3 convolution and its norm with attention along columns, then along rows.

    Average pooling replaces the stride of a convolution, as in axial-deeplab.

    Args:
        resnet: a ResNet of post-activation units; it is changed in place.
        config: its configuration; `image_size` is the largest one.
    """
    rows, columns = (-(-side // 4) for side in as_pair(config.image_size))
    for stage in resnet.stages:
        units: Any = stage.layers
        for unit in units:
            channels = unit.conv2.in_channels
            stride = unit.conv2.stride[0]
            pool = nn.AvgPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity()
            unit.conv2 = nn.Sequential(
                AxialAttention(channels, rows, True, config.group_norm_eps),
                AxialAttention(channels, columns, False, config.group_norm_eps),
                pool,
            )
            unit.norm2 = nn.Identity()  # the output of attention is already normalized
            rows, columns = -(-rows // stride), -(-columns // stride)
