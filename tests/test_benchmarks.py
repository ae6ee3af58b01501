"""What the benchmarks measure is what they say; their figures are not judged here."""

import importlib.util
import math
from pathlib import Path

import pytest

import hf_vit
from hf_vit.analysis.compute import count_multiply_adds
from hf_vit.analysis.training_runs import read_runs


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


def test_the_ladder_of_the_scaling_benchmark_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    scaling = load_benchmark("scaling")
    assert len(scaling.rungs(scaling.DATA["digits"])) == 7
    arguments = ["scaling.py", "--epochs", "0.5", "--output_dir", str(tmp_path), "--rungs"]
    monkeypatch.setattr("sys.argv", [*arguments, "16x1/4"])
    scaling.main()
    monkeypatch.setattr("sys.argv", [*arguments, "R+16x1/1", "16x1/4"])
    scaling.main()
    assert capsys.readouterr().out.count("| 16x1/4 | 0.5 | 0.06 million |") == 2
    runs = read_runs(tmp_path / "runs.csv")
    assert [(run.name, run.family) for run in runs] == [("R+16x1/1", "Hybrid"), ("16x1/4", "ViT")]
    assert runs[1].exaflops == pytest.approx(6 * count_multiply_adds(vit_16x1()) * 0.5 * 1437 / 1e18)
    assert len(list(tmp_path.glob("*-epochs/metrics.json"))) == 2
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def vit_16x1():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32}
    return hf_vit.HfViTConfig(**sizes, image_size=16, patch_size=4, num_labels=10)
