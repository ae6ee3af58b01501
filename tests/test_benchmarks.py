"""What the benchmarks measure is what they say; their figures are not judged here."""

import csv
import importlib.metadata
import json
import math
import sys
from argparse import Namespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageClassification

import hf_vit
from hf_vit import HfViTConfig
from hf_vit.analysis.compute import count_compute

from .paths import ROOT
from .tiny_models import SIZES

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


# Conversion


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


# What they share


def test_contestants_take_turns_and_warm_up_first():
    common, calls = load_benchmark("common"), []
    turns = common.take_turns({name: lambda name=name: calls.append(name) for name in "ABC"}, least=3, warm_up=1)
    assert calls[:3] == ["A", "B", "C"]
    assert [sorted(calls[start : start + 3]) for start in (3, 6, 9)] == [["A", "B", "C"]] * 3
    assert {name: len(seconds) for name, seconds in turns.items()} == {"A": 3, "B": 3, "C": 3}


def test_speed_up_is_the_ratio_of_medians_with_quartiles_of_the_rounds():
    common = load_benchmark("common")
    turns = {"ours": [1.0, 2.0, 4.0], "theirs": [3.0, 3.0, 4.0], "slow": [9.0, 9.0, 9.0]}
    assert common.fastest(turns, ("slow", "theirs", "absent")) == "theirs"
    speed_up = common.speed_up(turns, "ours", "theirs")
    assert speed_up["ratio"] == 1.5
    assert speed_up["pair_quartiles"] == [1.25, 1.5, 2.25]
    text = common.aims_table([("work", turns, [common.Aim("ours", ("theirs", "slow"), 2), common.Aim("no", (), 1)])])
    assert text.splitlines()[2:] == ["| work | ours | theirs | 1.50 (1.25 to 2.25) | 2 |"]


def test_results_of_another_machine_are_not_kept(tmp_path):
    common, path = load_benchmark("common"), tmp_path / "results" / "name.json"
    common.keep(path, {"a": {"machine": 1}, "b": {"machine": 1}})
    assert common.keep(path, {"b": {"machine": 1, "new": True}}).keys() == {"a", "b"}
    assert common.keep(path, {"c": {"machine": 2}}) == {"c": {"machine": 2}} == json.loads(path.read_text())


def test_each_result_is_saved_at_once(tmp_path, monkeypatch, capsys):
    common, page = load_benchmark("common"), tmp_path / "page.md"
    monkeypatch.setattr(common, "HERE", tmp_path)
    page.write_text("<!-- a: made by the benchmark --><!-- end of a -->")

    def measure(crash):
        yield "x", {"machine": 1}
        if crash:
            raise KeyboardInterrupt
        yield "y", {"machine": 1}

    with pytest.raises(KeyboardInterrupt):
        common.publish("a", measure(crash=True), "".join, write=True, page=page)
    assert json.loads((tmp_path / "results" / "a.json").read_text()).keys() == {"x"}
    common.publish("a", measure(crash=False), "".join, write=True, page=page)
    assert "\nxy\n" in page.read_text()
    assert capsys.readouterr().out == "xy\n"


def test_a_section_is_replaced_and_the_rest_stays(tmp_path):
    common, page = load_benchmark("common"), tmp_path / "page.md"
    page.write_text("before\n<!-- a: made by the benchmark -->\nold\n<!-- end of a -->\nafter\n")
    for text in ("first", "second"):
        common.update_section(page, "a", text)
    expected = "before\n<!-- a: made by the benchmark -->\n\nsecond\n\n<!-- end of a -->\nafter\n"
    assert page.read_text() == expected
    with pytest.raises(SystemExit, match="no section"):
        common.update_section(page, "b", "text")


def test_the_pages_have_every_written_section():
    for page, names in {
        "RESULTS.md": ("inference", "training_step", "gpu", "loading", "cold_start", "loading_images", "pipeline"),
        "README.md": ("cost", "floor"),
        "models.md": ("models",),
        "../docs/hardware.md": ("launchers",),
    }.items():
        for name in names:
            assert (BENCHMARKS / page).read_text().count(f"<!-- {name}: made by the benchmark -->") == 1


def test_a_separate_process_returns_its_last_line_or_its_error(tmp_path):
    common, program = load_benchmark("common"), tmp_path / "program.py"
    program.write_text("import sys\nprint('noise')\nprint('{\"sum\": %d}' % sum(map(int, sys.argv[1:])))")
    assert common.run_apart(program, 2, 3) == {"sum": 5}
    with pytest.raises(common.Failed, match="invalid literal"):
        common.run_apart(program, "x")


MEMORY = """
import json, sys
sys.path.insert(0, sys.argv[1])
from common import peak_mib
before = peak_mib()
block = b"x" * (50 << 20)
del block
print(json.dumps({"before": before, "after": peak_mib()}))
"""


def test_peak_memory_does_not_include_the_parent(tmp_path):
    """And not of this one, which has torch in it."""
    program = tmp_path / "program.py"
    program.write_text(MEMORY)
    measured = load_benchmark("common").run_apart(program, BENCHMARKS)
    assert measured["before"] < 50
    assert 45 < measured["after"] - measured["before"] < 60


@pytest.mark.parametrize("name", ["inference", "training_step", "loading", "floor"])
def test_arguments_of_a_benchmark(name, capsys):
    benchmark = load_benchmark(name)
    assert benchmark.parse_arguments(["--threads", "1"]).write is False
    assert benchmark.parse_arguments(["--write"]).threads == load_benchmark("common").processors()
    with pytest.raises(SystemExit):
        benchmark.parse_arguments(["--thread", "1"])
    assert "unrecognized arguments" in capsys.readouterr().err


# Inference


def line(**fields):
    return load_benchmark("inference").Line(
        **{"variant": "tiny", "image_size": 20, "dtype": "float32", "batch": 3, **fields}
    )


def test_lines_have_different_names(capsys):
    inference = load_benchmark("inference")
    inference.main(["--list"])
    names = capsys.readouterr().out.splitlines()
    assert len(set(names)) == len(names) == len(inference.LINES)
    assert {"B/16 224 float32 x1", "R50+B/16 384 float32 x4", "B/16 224 bfloat16 x8 compiled"} <= set(names)
    chosen = inference.parse_arguments(["--lines", names[3]])
    assert [line.name for line in inference.lines_of(chosen)] == [names[3]]


@pytest.mark.parametrize("fields", [{}, {"dtype": "bfloat16"}, {"mode": "attentions"}], ids=str)
def test_contestants_are_compared_and_timed(checkpoints, fields):
    inference, names = load_benchmark("inference"), ["hf_vit", "hf_vit optimised", "transformers"]
    result = inference.time_contest(line(**fields), names, checkpoints, seconds=0, least=2)
    assert {name: len(seconds) for name, seconds in result["turns"].items()} == dict.fromkeys(names, 2)
    assert result["differences"].keys() == set(names[1:])
    assert result["machine"]["versions"]["torch"] == importlib.metadata.version("torch")
    name = inference.LINES[0].name
    page = inference.as_markdown({name: {**result, "memory": {}}})
    assert f"| {name} | hf_vit optimised | transformers |" in page


def test_omitted_contestants_are_listed_with_the_reason(checkpoints, monkeypatch):
    inference = load_benchmark("inference")
    monkeypatch.setitem(sys.modules, "timm", None)
    _, left_out = inference.enter(line(), ["hf_vit", "timm"], checkpoints)
    assert left_out.keys() == {"timm"}
    assert left_out["timm"].startswith("not installed")


def test_contestants_with_other_outputs_are_not_timed(checkpoints):
    inference = load_benchmark("inference")
    ours = inference.build("hf_vit", line(), checkpoints)
    other = inference.Contestant(ours.forward, lambda: [array + 1 for array in ours.outputs()])
    assert inference.compare(line(), {"hf_vit": ours, "timm": ours}) == {"timm": 0}
    with pytest.raises(SystemExit, match="outputs of timm differ from those of hf_vit"):
        inference.compare(line(), {"hf_vit": ours, "timm": other})


def test_torchvision_loads_every_weight(checkpoints):
    """Where it is not installed, the names that its model would want are those that we convert from."""
    weights = torch.load(checkpoints / "torchvision.pth")
    assert weights["encoder.layers.encoder_layer_2.self_attention.in_proj_weight"].shape == (3 * 14, 14)
    assert sum(weight.numel() for weight in weights.values()) == sum(
        weight.numel() for weight in hf_vit.HfViTForImageClassification(HfViTConfig(**SQUARE)).parameters()
    )


# A training step and loading


def test_steps_are_compared_and_timed(checkpoints):
    benchmark = load_benchmark("training_step")
    sizes = ["--folder", checkpoints, "--image_size", 20, "--batch_size", 5, "--seconds", 0, "--least", 2]
    names = ["hf_vit", "transformers"]
    options = benchmark.parse_arguments([*map(str, sizes), "--contestants", *names])
    result = benchmark.time_steps(options)
    assert {name: len(seconds) for name, seconds in result["turns"].items()} == dict.fromkeys(names, 2)
    assert result["first_steps"]["hf_vit"]["gradient_norm"] > 0
    page = benchmark.as_markdown({"tiny x5": {**result, "memory": {}}})
    assert "| tiny x5 | hf_vit | transformers |" in page


def test_steps_that_differ_are_not_timed():
    benchmark = load_benchmark("training_step")
    steps = {"hf_vit": {"loss": 2.0, "gradient_norm": 1.0}, "timm": {"loss": 2.0, "gradient_norm": 1.1}}
    with pytest.raises(SystemExit, match=r"cannot compare timm: its gradient_norm is 1\.1 \(expected 1\)"):
        benchmark.compare(steps)


@pytest.mark.slow
def test_the_first_logit_of_a_new_process(checkpoints):
    benchmark = load_benchmark("loading")
    ours = benchmark.start("hf_vit", checkpoints, 20)
    model = AutoModelForImageClassification.from_pretrained(checkpoints / "hf_vit")
    expected = model(torch.zeros(1, 3, 20, 20)).logits[0, 0].item()
    assert ours["logit"] == pytest.approx(expected, rel=1e-4)
    assert len(ours["seconds"]) == len(benchmark.PARTS)


# The floor


HYBRID = {"patch_size": 1, "image_size": [36, 20], "stem_width": 32}
CONFIGS = {
    "cls": HfViTConfig(**SQUARE),
    "mean": HfViTConfig(**{**SQUARE, "pooling": "mean", "image_size": [20, 35]}),
    "hybrid": hf_vit.HfViTHybridConfig(**{**SQUARE, **HYBRID, "stem_depths": [1, 2]}),
    "root alone": hf_vit.HfViTHybridConfig(**{**SQUARE, **HYBRID, "stem_depths": []}),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_computed_cost_equals_torchs_counter(config):
    parts = load_benchmark("cost").cost(config)
    model = AutoModelForImageClassification.from_config(config, attn_implementation="eager").eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        size = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
        model(torch.zeros(1, 3, *size))
    assert 2 * sum(part.multiply_adds for part in parts) == counter.get_total_flops()
    assert sum(part.weights for part in parts) == sum(weight.numel() for weight in model.parameters())
    assert sum(part.multiply_adds for part in parts) == count_compute(config).logits_multiply_adds


def test_a_row_of_the_floor_by_hand():
    floor = load_benchmark("floor")
    result = {"parts": [{"multiply_adds": 5, "weights": 20, "activations": 3}], "batch_size": 2, "dtype": "bfloat16"}
    result["turns"] = {"hf_vit optimised": [0.5]}
    row = floor.floor_row("tiny", result, rate=40, bandwidth=26)
    assert row == ["tiny", "250.0", "500.0", "2.00", "0", "2000.0"]  # 10 multiply-adds, and 26 numbers of 2 bytes


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
    with (BENCHMARKS / "models.csv").open(newline="") as file:
        kept = {(one["model"], one["image size"]): one for one in csv.DictReader(file)}
    assert kept[kind.variant, "224"]["parameters [M]"] == row["parameters [M]"]
    assert len(kept) == len(models.kinds())
