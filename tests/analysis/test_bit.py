"""Compute of BiT ResNets, compared with the paper's values; filters of BiT ResNets."""

import pytest

from hf_vit import HfBiTConfig, analysis
from hf_vit.analysis import training_runs
from hf_vit.models.configuration_hf_bit import DEPTHS, VARIANTS

from ..references import BIT_PARAMETERS


def taps(size: int, kernel: int, stride: int, with_padding: bool) -> int:
    """Count the products of a kernel along one axis, with or without those with padding."""
    padding = (kernel - 1) // 2
    places = range((size + 2 * padding - kernel) // stride + 1)
    return sum(
        with_padding or 0 <= place * stride - padding + offset < size for place in places for offset in range(kernel)
    )


def multiply_adds(depths, factor: int, classes: int, with_padding: bool, size: int = 224) -> int:
    def convolution(entering, leaving, size, kernel, stride=1):
        return entering * leaving * taps(size, kernel, stride, with_padding) ** 2

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
    assert compute.multiply_adds == multiply_adds(DEPTHS[layers], factor, 1000, with_padding=True)
    assert compute.logits_multiply_adds == compute.multiply_adds
    assert compute.parameters == BIT_PARAMETERS[name]
    stages = [f"ResNet stage {number}" for number in (1, 2, 3, 4)]
    assert [part.name for part in compute.parts] == ["ResNet root", *stages, "normalization", "head"]


def test_exaflops_of_resnets_are_close_to_table_6():
    """Table 6: 3 to 5% above its values; within 1.5% without the products with padding."""
    rows = [row for row in training_runs.table_rows(6) if row["model"] in VARIANTS]
    assert len(rows) == 7
    for row in rows:
        assert 0.03 < row["computed"] / row["exaFLOPs"] - 1 < 0.05, row["model"]
        layers, factor = VARIANTS[row["model"]]
        seen = multiply_adds(DEPTHS[layers], factor, 18291, with_padding=False)
        exaflops = analysis.training_exaflops(seen, row["epochs"], 303e6)
        assert exaflops == pytest.approx(row["exaFLOPs"], rel=0.015), row["model"]
        assert row["computed_without_padding"] == pytest.approx(exaflops)
