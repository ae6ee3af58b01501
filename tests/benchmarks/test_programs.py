"""Smoke tests of the benchmarks, and the numbers that they compute."""

import importlib
import sys
from argparse import Namespace

import pytest
import torch
from transformers import AutoModelForImageClassification

import hf_vit
from hf_vit import HfViTConfig

from ..paths import ROOT
from ..processes import finish, start
from ..tiny_models import SIZES

BENCHMARKS = ROOT / "benchmarks"
SQUARE = {**SIZES, "image_size": 20, "patch_size": 5, "num_labels": 11}


def load_benchmark(name):
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))  # they import each other by name, as programs in one folder do
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    load_benchmark("contestants").make_checkpoints(HfViTConfig(**SQUARE), folder)
    return folder


PROGRAMS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_shows_its_options(name):
    path = str(BENCHMARKS / f"{name}.py")
    code = f"sys.path[0] = {str(BENCHMARKS)!r}\nsys.argv = [{path!r}, '--help']"
    done = finish(start(f"import runpy, sys\n{code}\nrunpy.run_path({path!r}, run_name='__main__')"))
    assert "usage:" in done.stdout


def test_the_checkpoint_of_the_conversion_benchmark_converts(tmp_path, monkeypatch):
    benchmark = load_benchmark("convert")
    sizes = {"DEPTH": 2, "WIDTH": 14, "MLP": 22, "HEADS": 2, "PATCH": 4, "TOKENS": 3 * 3 + 1, "CLASSES": 11}
    for name, value in sizes.items():
        monkeypatch.setattr(benchmark, name, value)
    benchmark.make_checkpoint(tmp_path / "tiny.npz")
    config = hf_vit.conversion.convert(tmp_path / "tiny.npz")[0].config
    assert (config.num_hidden_layers, config.hidden_size, config.num_labels) == (2, 14, 11)
    assert (config.pooling, config.image_size) == ("cls", 12)


def test_speed_up_is_the_ratio_of_medians_with_quartiles_of_the_rounds():
    common = load_benchmark("common")
    turns = {"ours": [1.0, 2.0, 4.0], "theirs": [3.0, 3.0, 4.0], "slow": [9.0, 9.0, 9.0]}
    assert common.fastest(turns, ("slow", "theirs", "absent")) == "theirs"
    speed_up = common.speed_up(turns, "ours", "theirs")
    assert speed_up["ratio"] == 1.5
    assert speed_up["pair_quartiles"] == [1.25, 1.5, 2.25]


def line(**fields):
    fields = {"variant": "tiny", "image_size": 20, "dtype": "float32", "batch": 3, **fields}
    return load_benchmark("inference").Line(**fields)


@pytest.mark.parametrize("fields", [{}, {"dtype": "bfloat16"}, {"mode": "attentions"}], ids=str)
def test_contestants_are_compared_and_timed(checkpoints, fields):
    inference, names = load_benchmark("inference"), ["hf_vit", "hf_vit optimized", "transformers"]
    result = inference.time_contest(line(**fields), names, checkpoints, seconds=0, least=2)
    assert {name: len(seconds) for name, seconds in result["turns"].items()} == dict.fromkeys(names, 2)
    assert result["differences"].keys() == set(names[1:])
    assert inference.as_markdown({inference.LINES[0].name: {**result, "memory": {}}})


def test_contestants_with_other_outputs_are_not_timed(checkpoints):
    inference = load_benchmark("inference")
    ours = inference.build("hf_vit", line(), checkpoints)
    other = inference.Contestant(ours.forward, lambda: [array + 1 for array in ours.outputs()])
    assert inference.compare(line(), {"hf_vit": ours, "timm": ours}) == {"timm": 0}
    with pytest.raises(SystemExit, match="hf_vit"):
        inference.compare(line(), {"hf_vit": ours, "timm": other})


def test_steps_are_compared_and_timed(checkpoints):
    benchmark = load_benchmark("training_step")
    sizes = ["--folder", checkpoints, "--image_size", 20, "--batch_size", 5, "--seconds", 0, "--least", 2]
    names = ["hf_vit", "transformers"]
    options = benchmark.parse_arguments([*map(str, sizes), "--contestants", *names])
    result = benchmark.time_steps(options)
    assert {name: len(seconds) for name, seconds in result["turns"].items()} == dict.fromkeys(names, 2)
    assert result["first_steps"]["hf_vit"]["gradient_norm"] > 0


@pytest.mark.slow
def test_the_first_logit_of_a_new_process(checkpoints):
    benchmark = load_benchmark("loading")
    ours = benchmark.start("hf_vit", checkpoints, 20)
    model = AutoModelForImageClassification.from_pretrained(checkpoints / "hf_vit")
    expected = model(torch.zeros(1, 3, 20, 20)).logits[0, 0].item()
    assert ours["logit"] == pytest.approx(expected, rel=1e-4)
    assert len(ours["seconds"]) == len(benchmark.PARTS)


def test_the_table_of_models_has_computed_and_measured_values(monkeypatch):
    """The parameters and multiply-adds are those that timm gives for its copy of the architecture."""
    models = load_benchmark("models")
    [kind] = (kind for kind in models.kinds() if kind.name == "R+Ti/16 224")
    monkeypatch.setattr(models, "BACKENDS", {"torch": ("float32", "torch")})
    measured = models.measure(Namespace(apart=kind.name, seconds=0))
    row = models.row_of(kind, models.cost_of(kind), measured)
    assert (row["parameters [M]"], row["multiply-adds [G]"]) == ("6.34", "0.43")
    assert (row["ImageNet top-1 [%]"], row["model"], row["image size"]) == ("71.80", "R+Ti/16", "224")
    assert float(row["torch [images/s]"]) > 0
    assert measured["differences"]["torch"] < 1e-4
