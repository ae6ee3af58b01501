"""Plans: figures about the data, what is kept of the given settings, and a run with the recipe "auto"."""

import shlex

import numpy as np
import pytest
import yaml
from PIL import Image

import hf_vit
from hf_vit.cli import main
from hf_vit.settings.fields import FinetuneSettings
from hf_vit.settings.options import parse_settings

from ..commands import finetune
from ..processes import arguments
from ..tiny_models import save_tiny


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """18 and 3 pictures to train, one of them twice and once among the 4 held-out ones; one file is damaged."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name, count in {"train/many": 16, "train/few": 3, "test/many": 2, "test/few": 1}.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (30, 40 + 20 * number, 3), np.uint8)
            Image.fromarray(pixels).save(root / f"{name}/{number}.png")
    content = (root / "train/many/0.png").read_bytes()
    for copy in ("train/many/copy.png", "test/many/copy.png"):
        (root / copy).write_bytes(content)
    (root / "train/many/damaged.png").write_bytes(content[:20])
    return root


def test_a_plan_has_figures_reasons_and_the_given_settings(pictures, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = hf_vit.plan(pictures, tiny, image_size=16, batch_size=7)
    assert plan.data == {
        "images": 21,
        "held_out": 4,
        "classes": 2,
        "smallest_class": 3,
        "largest_class": 18,
        "shorter_side": [30, 30, 30],
        "long": 15 / 20,  # 80 by 30 pixels or more: 14 of 16, 1 of 3
        "exact_duplicates": 2,
        "leaks": 1,
    }
    assert plan.settings.keys() == plan.reasons.keys() == {"learning_rate", "epochs", "class_sampling"}
    assert plan.steps == 100
    assert plan.settings["epochs"] == round(100 * 7 / 21, 2)
    assert plan.settings["learning_rate"] == pytest.approx(0.003 * 7 / 32)
    assert plan.seconds > 0
    assert all(name.replace("_", " ") in plan.describe() for name in plan.settings)
    assert not list(tmp_path.iterdir())


def test_a_shorter_time_gives_a_smaller_image_size(pictures, tmp_path):
    model = save_tiny(tmp_path / "model", image_size=(32, 48), patch_size=16)
    sizes = [hf_vit.plan(pictures, model, minutes, steps=3).settings["image_size"] for minutes in (1e-9, 1e9)]
    assert sizes == [112, 224]


def test_the_recipe_auto_is_the_plan(pictures, tiny, tmp_path, capsys):
    run = {"image_size": 16, "steps": 1, "num_workers": 0, "report_to": "none"}
    metrics = hf_vit.finetune(tiny, pictures, tmp_path / "out", recipe="auto", **run)
    assert metrics["samples"] == 4
    assert "leaks" not in capsys.readouterr().out  # the plan is on the standard error
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    assert (recipe["batch_size"], recipe["class_sampling"], recipe["image_size"]) == (32, "balanced", 16)
    options = arguments(recipe="auto", model=tiny, dataset=pictures, output_dir=tmp_path / "out", steps=1)
    finetune([*options, "--resume", "--print-config"])
    assert yaml.safe_load(capsys.readouterr().out)["image_size"] == 16
    with pytest.raises(ValueError, match="dataset"):
        finetune(["--recipe", "auto", "--model", str(tiny), "--output-dir", str(tmp_path / "none")])


def test_the_command_prints_the_command_to_run(pictures, tiny, tmp_path, capsys):
    """It can be pasted into a shell, and has the given options."""
    spaced = tmp_path / "my pictures"
    spaced.symlink_to(pictures)
    assert main(["plan", str(tiny), str(spaced), "--image-size", "16", "--eval-split", "train"]) == 0
    program, command, *options = shlex.split(capsys.readouterr().out.splitlines()[-1])
    settings = parse_settings(FinetuneSettings, options)
    assert (program, command) == ("hf-vit", "finetune")
    assert (settings.dataset, settings.model) == (str(spaced), str(tiny))
    assert (settings.image_size, settings.eval_split) == (16, "train")
    assert main(["plan", str(tiny), str(pictures / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["plan", str(spaced), "ti16"]) == 2  # the order of an earlier version
    assert f"hf-vit plan ti16 {spaced}" in capsys.readouterr().err
