"""What devices can do, on the two that every build of torch has: the CPU, and "meta", which computes no values."""

import pytest
import torch

from hf_vit.data import devices

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    ("capability", "device", "expected"),
    [
        (devices.has_fused_optimizers, CPU, True),
        (devices.has_fused_optimizers, META, False),
        (devices.has_float64, CPU, True),
        (devices.can_augment, CPU, False),  # the data workers do it
        (devices.can_augment, META, True),
        (devices.can_compile, META, False),
    ],
)
def test_capabilities(capability, device, expected):
    assert capability(device) is expected


def test_peaks_of_data_sheets():
    assert devices.find_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert devices.find_peak("NVIDIA H100 PCIe") == 756e12
    assert devices.find_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert devices.find_peak("tpu TPU v6e") == 918e12
    assert devices.find_peak("Tesla P4") is None


def test_copies_for_the_host_are_copies():
    tensor = torch.arange(6.0).view(2, 3).t()
    copied = devices.copy_to_host({"a": tensor})["a"]
    tensor.zero_()
    assert copied.is_contiguous()
    assert copied.tolist() == [[0, 3], [1, 4], [2, 5]]
