"""What the benchmarks measure is what they say; their figures are not judged here."""

import importlib.util
import math
from pathlib import Path

import hf_vit


def load_benchmark(name):
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_checkpoint_of_the_conversion_benchmark_is_a_vit_l16():
    sizes = [math.prod(shape) for _, shape in load_benchmark("convert").array_shapes()]
    assert sum(sizes) == 304_326_632  # as the released L/16 with 1000 classes


def test_the_checkpoint_of_the_conversion_benchmark_converts(tmp_path, monkeypatch):
    benchmark = load_benchmark("convert")
    sizes = {"DEPTH": 2, "WIDTH": 14, "MLP": 22, "HEADS": 2, "PATCH": 4, "TOKENS": 3 * 3 + 1, "CLASSES": 11}
    for name, value in sizes.items():
        monkeypatch.setattr(benchmark, name, value)
    benchmark.make_checkpoint(tmp_path / "tiny.npz")
    config = hf_vit.conversion.convert(tmp_path / "tiny.npz")[0].config
    assert (config.num_hidden_layers, config.hidden_size, config.num_labels) == (2, 14, 11)
    assert (config.pooling, config.image_size) == ("cls", 12)


def test_multiply_adds_of_axial_attention_are_linear_in_rows_plus_columns():
    benchmark = load_benchmark("variants")
    for rows, columns in ((2, 3), (5, 4)):
        tokens, width = rows * columns, benchmark.HIDDEN_SIZE
        plain = benchmark.multiply_adds((rows, columns), "all", 1)
        axial = benchmark.multiply_adds((rows, columns), "axial", 2)
        assert plain["attention"] == 2 * tokens * tokens * width
        assert axial["attention"] == 2 * tokens * (rows + columns) * width
        assert axial["block"] - axial["attention"] == 2 * (plain["block"] - plain["attention"])


def test_the_rows_that_the_benchmark_of_variants_trains_are_those_of_its_recipes():
    benchmark = load_benchmark("variants")
    assert benchmark.levels("table8_digits.yaml", "positions")[-1] == "relative"
    assert benchmark.levels("figure9_digits.yaml", "rate")[:2] == ["0.001", "0.003"]
