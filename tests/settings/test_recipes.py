"""Settings: one parser for YAML and command line, and mistakes are one sentence."""

import pytest
import yaml

from hf_vit.settings.fields import FinetuneSettings, PretrainSettings
from hf_vit.settings.options import parse_settings
from hf_vit.settings.recipes import dump, read_recipe

ENOUGH = ["--dataset", "digits", "--model", "m", "--output_dir", "out", "--steps", "7"]


def test_command_line_values_have_the_type_of_their_field():
    options = "--learning_rate 1e-3 --flip false --compile --crop_area 0.2,1 --eval_split none"
    settings = parse_settings(
        FinetuneSettings,
        [*ENOUGH, *options.split(), "--freeze", "first 2 layers, a.b"],
    )
    assert settings.eval_split is None
    assert settings.learning_rate == 0.001
    assert settings.flip is False
    assert settings.compile is True
    assert settings.crop_area == [0.2, 1.0]
    assert settings.freeze == ["first 2 layers", "a.b"]


def test_yaml_and_command_line_agree_and_the_command_line_wins(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rate: 1e-3\nmixed_precision: no\nsteps: 9\nmodel: m\ndataset: d\noutput_dir: o\n")
    settings = parse_settings(FinetuneSettings, ["--recipe", str(recipe), "--steps", "5"])
    assert (settings.learning_rate, settings.mixed_precision, settings.steps) == (0.001, "no", 5)


def test_epochs_on_the_command_line_replace_the_steps_of_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: 9\n")
    settings = parse_settings(FinetuneSettings, ["--recipe", str(recipe), *ENOUGH[:-2], "--epochs", "1.5"])
    assert (settings.steps, settings.epochs) == (None, 1.5)


def test_base_options_and_selection(tmp_path):
    (tmp_path / "base.yaml").write_text("batch_size: 3\nseed: 1\n")
    (tmp_path / "child.yaml").write_text(
        "base: base.yaml\nseed: 2\noptions:\n  rate:\n    low: {learning_rate: 0.1}\n    0.5: {learning_rate: 0.5}\n"
        "select: {rate: low}\n"
    )
    child = tmp_path / "child.yaml"
    assert read_recipe(child) == {"batch_size": 3, "seed": 2, "learning_rate": 0.1}
    assert read_recipe(child, {"rate": "0.5"})["learning_rate"] == 0.5
    with pytest.raises(ValueError, match="'high'"):
        read_recipe(child, {"rate": "high"})
    with pytest.raises(ValueError, match="'size'"):
        read_recipe(child, {"size": "low"})


def test_a_level_selects_levels_of_other_groups(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "options: {mix: {none: {mixup_alpha: 0}, 2: {mixup_alpha: 2}}}\nselect: {mix: none}\n"
    )
    (tmp_path / "child.yaml").write_text(
        "base: base.yaml\noptions: {model: {small: {steps: 1}, large: {steps: 2, select: {mix: 2}}}}\n"
        "select: {model: small}\n"
    )
    child = tmp_path / "child.yaml"
    assert read_recipe(child) == {"mixup_alpha": 0, "steps": 1}
    assert read_recipe(child, {"model": "large"}) == {"mixup_alpha": 2, "steps": 2}
    assert read_recipe(child, {"model": "large", "mix": "none"}) == {"mixup_alpha": 0, "steps": 2}
    with pytest.raises(ValueError, match="'3'"):
        read_recipe(child, {"mix": "3"})


def test_tables_are_merged_field_by_field(tmp_path):
    (tmp_path / "base.yaml").write_text("config: {hidden_size: 14, patch_size: 4}\nvariant: B/16\n")
    (tmp_path / "child.yaml").write_text(
        "base: base.yaml\noptions: {head: {mean: {config: {pooling: mean, patch_size: 2}}}}\nselect: {head: mean}\n"
    )
    child = ["--recipe", str(tmp_path / "child.yaml"), "--dataset", "digits", "--output_dir", "out", "--steps", "7"]
    settings = parse_settings(PretrainSettings, [*child, "--config", "{hidden_size: 22}"])
    assert settings.config == {"hidden_size": 22, "patch_size": 2, "pooling": "mean"}


def test_recipe_overrides_the_options_of_its_base(tmp_path):
    (tmp_path / "base.yaml").write_text("options: {length: {long: {steps: 9}}}\nselect: {length: long}\n")
    (tmp_path / "child.yaml").write_text("base: base.yaml\nepochs: 2\n")
    assert read_recipe(tmp_path / "child.yaml") == {"epochs": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--learning_rat 0.1", "--learning-rat"),
        ("--learning_rate fast", "learning_rate"),
        ("--batch_size 2.5", "batch_size"),
        ("--optimizer lion", "optimizer"),
        ("--epochs 3", "epochs"),
        ("--warmup_steps 2.5", "warmup_steps"),
        ("--weight_decay 0.1 --momentum_dtype bfloat16", "momentum_dtype"),
        ("--linear_probe --lora_rank 4", "lora_rank"),
        ("--schedule staircase", "schedule"),
        ("--decay_steps 3,5", "schedule"),
        ("--schedule rsqrt --final_learning_rate 1e-5", "schedule"),
        ("--optimizer muon --momentum_dtype bfloat16", "float32"),
        ("--optimizer muon --lora_rank 4", "lora_rank"),
        ("--class_sampling balanced --class_weights balanced", "class_sampling"),
        ("--schedule staircase --decay_steps 3,5 --decay_factors 0.1", "decay_factors"),
        ("--resume --overwrite", "overwrite"),
        ("--crop random", "resize"),
        ("--crop resmall --resize [448,448]", "resize"),
        ("--batch_size 0", "batch_size"),
        ("--crop_area 0.5", "crop_area"),
        ("--crop_area 1,0.05", "crop_area"),
        ("--ema_decay 1", "ema_decay"),
        ("--recipe missing.yaml", "missing.yaml"),
        ("--select a=b", "--recipe"),
        ("--preset native --compile", "compile"),
        ("--preset native --augment_on device", "augment_on"),
        ("--decode_on device --augment_on cpu", "decode_on"),
        ("--decode_on device --antialias true", "antialias"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        parse_settings(FinetuneSettings, [*ENOUGH, *arguments.split()])
    assert "\n" not in str(raised.value)


def test_unknown_setting_in_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rate: fast\n")
    with pytest.raises(ValueError, match="learning_rate"):  # as the file has it
        parse_settings(FinetuneSettings, ["--recipe", str(recipe), *ENOUGH])
    recipe.write_text("learnig_rate: 1\n")
    with pytest.raises(ValueError, match="learnig_rate"):
        parse_settings(FinetuneSettings, ["--recipe", str(recipe), *ENOUGH])


def test_resolved_settings_are_a_recipe_again(tmp_path):
    arguments = "--dataset digits --output_dir o --epochs 2 --variant B/16 --optimizer adamw"
    settings = parse_settings(PretrainSettings, arguments.split())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump(settings))
    assert parse_settings(PretrainSettings, ["--recipe", str(recipe)]) == settings
    assert "resume" not in yaml.safe_load(dump(settings))


MASKED = "--variant B/16 --objective masked_patch_prediction"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{MASKED} --mixup_alpha 0.2", "mixup_alpha"),
        (f"{MASKED} --mask_share 0.95", "mask_share"),
        (f"{MASKED} --class_weights balanced", "class_weights"),
        (f"{MASKED} --head mlp", "head"),
        ('--variant B/16 --head mlp --config {"representation_size":9}', "representation_size"),
        ("", "variant"),
    ],
)
def test_contradictions_of_pretraining(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_settings(PretrainSettings, [*ENOUGH[:2], *ENOUGH[4:], *arguments.split()])
