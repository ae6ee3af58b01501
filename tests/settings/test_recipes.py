"""Settings: one parser for YAML and command line, and mistakes are one sentence."""

import pytest
import yaml

from hf_vit.settings.fields import FinetuneSettings, PretrainSettings
from hf_vit.settings.options import parse_settings
from hf_vit.settings.recipes import dump, read_recipe

ENOUGH = ["--dataset", "digits", "--model", "m", "--output_dir", "out", "--steps", "7"]


def test_command_line_values_have_the_type_of_their_field():
    options = "--learning_rate 1e-3 --flip false --compile --crop_area 0.2,1 --eval_split none"
    settings = parse_settings(FinetuneSettings, [*ENOUGH, *options.split(), "--freeze", "first 2 layers, a.b"])
    assert (settings.eval_split, settings.learning_rate) == (None, 0.001)
    assert (settings.flip, settings.compile) == (False, True)
    assert (settings.crop_area, settings.freeze) == ([0.2, 1.0], ["first 2 layers", "a.b"])


def test_yaml_and_command_line_agree_and_the_command_line_wins(tmp_path):
    """Its epochs replace the steps of the recipe."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rate: 1e-3\nmixed_precision: no\nsteps: 9\nmodel: m\ndataset: d\noutput_dir: o\n")
    settings = parse_settings(FinetuneSettings, ["--recipe", str(recipe), "--steps", "5"])
    assert (settings.learning_rate, settings.mixed_precision, settings.steps) == (0.001, "no", 5)
    settings = parse_settings(FinetuneSettings, ["--recipe", str(recipe), "--epochs", "1.5"])
    assert (settings.steps, settings.epochs) == (None, 1.5)


def write_child(folder, base: str, child: str):
    """Write two recipes; return the file of the one that is based on the other."""
    (folder / "base.yaml").write_text(base)
    (folder / "child.yaml").write_text(f"base: base.yaml\n{child}")
    return folder / "child.yaml"


def test_base_options_and_selection(tmp_path):
    levels = "{low: {learning_rate: 0.1}, 0.5: {learning_rate: 0.5}}"
    child = f"seed: 2\noptions: {{rate: {levels}}}\nselect: {{rate: low}}"
    child = write_child(tmp_path, "batch_size: 3\nseed: 1", child)
    assert read_recipe(child) == {"batch_size": 3, "seed": 2, "learning_rate": 0.1}
    assert read_recipe(child, {"rate": "0.5"})["learning_rate"] == 0.5
    for select, named in (({"rate": "high"}, "'high'"), ({"size": "low"}, "'size'")):
        with pytest.raises(ValueError, match=named):
            read_recipe(child, select)


def test_a_level_selects_levels_of_other_groups(tmp_path):
    base = "options: {mix: {none: {mixup_alpha: 0}, 2: {mixup_alpha: 2}}}\nselect: {mix: none}"
    models = "{small: {steps: 1}, large: {steps: 2, select: {mix: 2}}}"
    child = write_child(tmp_path, base, f"options: {{model: {models}}}\nselect: {{model: small}}")
    assert read_recipe(child) == {"mixup_alpha": 0, "steps": 1}
    assert read_recipe(child, {"model": "large"}) == {"mixup_alpha": 2, "steps": 2}
    assert read_recipe(child, {"model": "large", "mix": "none"}) == {"mixup_alpha": 0, "steps": 2}
    with pytest.raises(ValueError, match="'3'"):
        read_recipe(child, {"mix": "3"})


def test_tables_are_merged_field_by_field(tmp_path):
    head = "options: {head: {mean: {config: {pooling: mean, patch_size: 2}}}}\nselect: {head: mean}"
    child = write_child(tmp_path, "config: {hidden_size: 14, patch_size: 4}\nvariant: B/16", head)
    arguments = ["--recipe", str(child), "--dataset", "digits", "--output_dir", "out", "--steps", "7"]
    settings = parse_settings(PretrainSettings, [*arguments, "--config", "{hidden_size: 22}"])
    assert settings.config == {"hidden_size": 22, "patch_size": 2, "pooling": "mean"}


def test_recipe_overrides_the_options_of_its_base(tmp_path):
    child = write_child(tmp_path, "options: {length: {long: {steps: 9}}}\nselect: {length: long}", "epochs: 2")
    assert read_recipe(child) == {"epochs": 2}


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
        ("--preset native --mixup_alpha 0.2", "mixup_alpha"),
        ("--preset native --crop random --resize 40", "crop"),
        ("--preset native --token_drop 1", "token_drop"),
        ("--preset native --teacher t", "teacher"),
        ("--token_drop 0.3", "token_drop"),
        ("--teacher t --label_smoothing 0.1", "label_smoothing"),
        ("--teacher t --class_weights balanced", "class_weights"),
        ("--patch_sizes 4,0", "patch_sizes"),
        ("--patch_size_weights 1,2", "patch_size_weights"),
        ("--folds 1", "folds"),
        ("--folds 4 --eval_split train", "eval_split"),
    ],
)
def test_mistakes_are_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message) as raised:
        parse_settings(FinetuneSettings, [*ENOUGH, *arguments.split()])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["learning_rate: fast", "learnig_rate: 1"])
def test_mistakes_in_a_recipe_are_named_as_the_file_has_them(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=text.split(":")[0]):
        parse_settings(FinetuneSettings, ["--recipe", str(tmp_path / "recipe.yaml"), *ENOUGH])


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
        (f"{MASKED} --patch_sizes 4,2", "masked_patch_prediction"),
        ('--variant B/16 --head mlp --config {"representation_size":9}', "representation_size"),
        ("", "variant"),
    ],
)
def test_contradictions_of_pretraining(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_settings(PretrainSettings, [*ENOUGH[:2], *ENOUGH[4:], *arguments.split()])
