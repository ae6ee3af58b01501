"""Options of the commands: help, suggestions for unknown ones, and names of recipes."""

import inspect

import pytest

import hf_vit
from hf_vit.cli import main
from hf_vit.cli.command_line import build_parser, commands_of
from hf_vit.settings.fields import FinetuneSettings
from hf_vit.settings.options import parse_settings
from hf_vit.settings.recipes import about_recipe, installed_recipes, read_recipe

from ..paths import RECIPES


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["finetne"], "finetune"),
        (["predict", "folder", "a.jpg", "--topk", "3"], "--topk"),
        (["finetune", "--learning-rat", "1"], "--learning-rat"),
        (["pretrain", "--recipe", "digit"], "digits"),
        (["recipes", "show", "lorra"], "lora"),
        (["recipes", "show"], "`hf-vit recipes`"),
        (["launch-configs", "path", "multi_gpus"], "multi_gpu"),
    ],
)
def test_unknown_options_and_commands(arguments, sentence, capsys):
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert sentence in capsys.readouterr().err


def test_options_with_dashes_and_underscores_are_the_same():
    common = ["--dataset", "digits", "--model", "m", "--steps", "3"]
    one = parse_settings(FinetuneSettings, [*common, "--output-dir", "a_b", "--learning-rate=1e-3"])
    assert one == parse_settings(FinetuneSettings, [*common, "--output_dir", "a_b", "--learning_rate=1e-3"])
    assert (one.output_dir, one.learning_rate) == ("a_b", 1e-3)


def test_a_recipe_by_its_name_or_as_a_base(tmp_path):
    assert read_recipe("digits") == read_recipe("digits.yaml") == read_recipe(RECIPES / "digits.yaml")
    (tmp_path / "mine.yaml").write_text("base: finetune_small\nlearning_rate: 0.02\n")
    assert read_recipe(tmp_path / "mine.yaml") == {**read_recipe("finetune_small"), "learning_rate": 0.02}
    with pytest.raises(ValueError, match="recipe"):
        read_recipe(tmp_path / "digits")


def test_recipes_are_listed_with_hardware_and_expected_results(run_command):
    listed = run_command(["recipes"])
    for name, path in installed_recipes().items():
        about = about_recipe(path)
        assert all(about), f"{name} does not say what it is, its hardware or what to expect"
        assert name in listed
        assert about[0] in listed
    assert run_command(["recipes", "show", "digits"]) == (RECIPES / "digits.yaml").read_text()


def test_completion_of_commands_and_settings(run_command):
    pytest.importorskip("shtab")
    script = run_command(["completion", "bash"])
    assert "--learning-rate" in script
    assert "--top-k" in script


@pytest.mark.parametrize("command", ["predict", "embed", "soup", "plan", "calibrate", "quantize", "push"])
def test_a_command_and_its_python_function_have_the_same_defaults(command):
    run = commands_of(build_parser(command))[command].get_default("run")
    options = inspect.signature(run).parameters
    arguments = inspect.signature(getattr(hf_vit, command)).parameters
    optional = [
        name for name in options if name in arguments and arguments[name].default is not inspect.Parameter.empty
    ]
    assert optional
    for name in optional:
        default = arguments[name].default
        assert options[name].default in (default, False if default is None else default), name  # a flag has no None
