"""The studies of benchmarks/: what they train is what they say, and their numbers are computed right."""

import csv

import numpy as np
import pytest

from hf_vit.models.compute import count_compute, count_multiply_adds
from hf_vit.models.registry import config_of_variant
from hf_vit.settings.fields import PretrainSettings
from hf_vit.settings.recipes import build, read_recipe
from hf_vit.training.build import build_config

from .test_programs import load_benchmark

FEW_STEPS = ["--settings", "steps=2", "warmup_steps=0"]


@pytest.fixture(scope="module")
def studies():
    return load_benchmark("studies")


def rows_of(folder) -> list[dict[str, str]]:
    with (folder / "runs.csv").open(newline="") as file:
        return list(csv.DictReader(file))


SMOKE = {"figure8": ["none", "depth-1"], "table7": ["adam-0.01", "sgd-0.1"], "axial_resnet": ["ViT", "AxialResNet"]}


@pytest.mark.slow
@pytest.mark.parametrize("study", SMOKE)
@pytest.mark.usefixtures("fresh_accelerator", "blank_figures")
def test_smoke_of_a_study(studies, study, tmp_path):
    studies.main([study, "--only", *SMOKE[study], *FEW_STEPS, "--output_dir", str(tmp_path)])
    rows = rows_of(tmp_path)
    assert (tmp_path / "study.md").read_text().count("\n") == len(rows) + 2
    assert list(tmp_path.glob("*.png"))
    assert all(0 <= float(row["accuracy"]) <= 100 and float(row["exaflops"]) > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator", "blank_figures")
def test_a_study_continues_where_it_stopped_and_repeats_runs_of_other_settings(studies, tmp_path):
    arguments = ["figure5", "--output_dir", str(tmp_path), *FEW_STEPS, "--only"]
    studies.main([*arguments, "16x1/4"])
    first = rows_of(tmp_path)
    studies.main([*arguments, "R+16x1/1", "16x1/4"])
    second = rows_of(tmp_path)
    assert second[0] == first[0]  # its seconds too: it was read
    assert [row["size"] for row in second] == ["16x1/4", "R+16x1/1"]
    fields = read_recipe("small", {"size": "16x1/4"})
    config = build_config(build(PretrainSettings, {**fields, "output_dir": "out"}))
    assert float(first[0]["exaflops"]) == pytest.approx(6 * count_multiply_adds(config) * 2 * 64 / 1e18)
    studies.main([*arguments, "16x1/4", "--settings", "steps=3", "warmup_steps=0"])
    assert float(rows_of(tmp_path)[0]["exaflops"]) == pytest.approx(1.5 * float(first[0]["exaflops"]))


def test_every_trial_builds_on_every_data_set(studies):
    for name in studies.STUDIES:
        for dataset in studies.IMAGES:
            trials = studies.trials_of(name, dataset)
            assert len({str(trial.columns) for trial in trials}) == len(trials) > 1
            for trial in trials:
                values = read_recipe("small", {"data": dataset, **trial.select})
                settings = build(PretrainSettings, {**values, "output_dir": "out"})
                assert build_config(settings).image_size == {"digits": 16, "mnist": 32, "cifar10": 32}[dataset]


def test_multiply_adds_of_axial_attention_are_linear_in_rows_plus_columns():
    cost = load_benchmark("studies_cost")
    for rows, columns in ((2, 3), (5, 4)):
        tokens, width = rows * columns, 768
        plain, axial = cost.multiply_adds((rows, columns), "all", 1), cost.multiply_adds((rows, columns), "axial", 2)
        assert plain["attention"] == 2 * tokens * tokens * width
        assert axial["attention"] == 2 * tokens * (rows + columns) * width
        assert axial["block"] - axial["attention"] == 2 * (plain["block"] - plain["attention"])


def test_the_largest_batch_fits_and_one_more_image_does_not():
    cost = load_benchmark("studies_cost")
    for name in ("S/16", "R50x1"):
        compute = count_compute(config_of_variant(name, num_labels=1000, image_size=64))
        for memory in (1e9, 16 * 2.0**30):
            batch = cost.largest_batch(compute, memory)
            taken = np.float64(compute.activation_bytes) * np.array([batch, batch + 1]) + 4.0 * 4 * compute.parameters
            assert taken[0] <= memory < taken[1]
    assert cost.largest_batch(compute, 1e6) == 0


@pytest.mark.slow
def test_smoke_of_the_speed_study(tmp_path):
    text, figures = load_benchmark("studies_cost").speed_and_batch(("Ti/16", "R50x1"), (32, 64), rounds=1)
    assert text.count("\n") == 5
    assert figures.keys() == {"speed", "largest-batch"}
