"""`hf-vit benchmark`: the table of a tiny model."""

import re

import pytest

from hf_vit import HfViTModel

from ..tiny_models import save_tiny, tiny

QUICK = ("--seconds", "0", "--device", "cpu")


def rows_of(printed: str) -> dict[str, list[float]]:
    """Return name -> times and difference."""
    found = re.findall(r"^(\S.*?)  +((?:[\d.]+(?:e[+-]\d+)?\s*?)+)$", printed, re.MULTILINE)
    return {name: [float(number) for number in numbers.split()] for name, numbers in found}


@pytest.mark.slow
def test_each_precision_is_timed_and_compared_with_float32(tmp_path, run_command):
    folder = str(save_tiny(tmp_path / "tiny"))
    printed = run_command(["benchmark", folder, "--batch-sizes", "1", "3", "--image-size", "28x42", *QUICK])
    assert "28 x 42" in printed
    rows = rows_of(printed)
    assert {"PyTorch", "PyTorch, optimized", "PyTorch, optimized, bfloat16"} <= set(rows)
    assert "int8" not in rows
    assert all(len(numbers) == 3 and min(numbers[:2]) > 0 for numbers in rows.values())
    assert rows["PyTorch"][-1] == 0
    for name, (*_, difference) in rows.items():
        low, high = (1e-5, 0.3) if "bfloat16" in name else (0, 1e-4)
        assert low <= difference <= high, name


@pytest.mark.slow
def test_a_folder_of_quantize_has_a_row_of_int8(quantized, run_command):
    assert "int8" in rows_of(run_command(["benchmark", quantized, "--batch-sizes", "2", *QUICK]))


def test_an_encoder_is_refused(tmp_path, run_command):
    HfViTModel(tiny().config).save_pretrained(tmp_path / "encoder")
    assert "HfViTModel" in run_command(["benchmark", tmp_path / "encoder"], status=2)
