"""Compute of BiT ResNets, compared with a formula."""

import pytest

from hf_vit import HfBiTConfig, analysis
from hf_vit.models.configuration_hf_bit import DEPTHS, VARIANTS

from ..references import BIT_PARAMETERS


def multiply_adds(depths, factor: int, classes: int, size: int = 224) -> int:
    def convolution(entering, leaving, size, kernel, stride=1):
        return entering * leaving * (kernel * -(-size // stride)) ** 2

    width = 64 * factor
    total, entering, size = convolution(3, width, size, 7, 2), width, size // 4
    for stage, depth in enumerate(depths):
        middle = width * 2**stage
        for unit in range(depth):
            stride = 2 if stage and not unit else 1
            total += convolution(entering, middle, size, 1) + convolution(middle, middle, size, 3, stride)
            if not unit:
                total += convolution(entering, 4 * middle, size, 1, stride)
            size //= stride
            total += convolution(middle, 4 * middle, size, 1)
            entering = 4 * middle
    return total + entering * classes


@pytest.mark.parametrize("name", ["R50x1", "R101x3"])
def test_multiply_adds_and_parameters(name):
    layers, factor = VARIANTS[name]
    compute = analysis.count_compute(HfBiTConfig.from_variant(name, num_labels=1000))
    assert compute.multiply_adds == multiply_adds(DEPTHS[layers], factor, 1000)
    assert compute.logits_multiply_adds == compute.multiply_adds
    assert compute.parameters == BIT_PARAMETERS[name]
    stages = [f"ResNet stage {number}" for number in (1, 2, 3, 4)]
    assert [part.name for part in compute.parts] == ["ResNet root", *stages, "normalization", "head"]
