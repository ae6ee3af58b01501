"""Command line of the training scripts: the model as a word, and option names of other libraries."""

import dataclasses
import re
from pathlib import Path

import pytest

from hf_vit.settings.fields import AuditSettings, EvaluateSettings, FinetuneSettings, PretrainSettings
from hf_vit.settings.options import parse_settings
from hf_vit.settings.parser import SAME_ELSEWHERE

FINETUNE = "--dataset digits --epochs 1 --output-dir out".split()


@pytest.mark.parametrize("position", range(0, len(FINETUNE) + 1, 2))
def test_the_model_is_a_word_at_any_position(position):
    arguments = [*FINETUNE[:position], "ti16", *FINETUNE[position:]]
    assert parse_settings(FinetuneSettings, arguments) == parse_settings(FinetuneSettings, [*FINETUNE, "--model=ti16"])
    assert parse_settings(EvaluateSettings, ["ti16", "--dataset", "digits"]).model == "ti16"


def test_words_fill_what_no_option_gives(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    all_words = parse_settings(FinetuneSettings, ["ti16", "digits", "out", "--epochs", "1"])
    assert (all_words.model, all_words.dataset, all_words.output_dir) == ("ti16", "digits", "out")
    assert parse_settings(FinetuneSettings, ["ti16", "out", "--dataset", "digits", "--epochs", "1"]) == all_words
    assert parse_settings(FinetuneSettings, ["digits", "out", "--epochs", "1", "--model=ti16"]) == all_words
    pretrained = parse_settings(PretrainSettings, ["digits", "out", "--epochs", "1", "--variant", "Ti/16"])
    assert (pretrained.dataset, pretrained.output_dir) == ("digits", "out")


def test_data_in_the_place_of_the_model_is_an_error_with_the_right_order(tmp_path):
    (tmp_path / "cats" / "tabby").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"augreg:Ti/16 .*cats"):
        parse_settings(FinetuneSettings, [str(tmp_path / "cats"), "augreg:Ti/16"], "hf-vit finetune")


def test_runs_without_a_folder_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["ti16", "digits", "--epochs", "1"]
    assert Path(str(parse_settings(FinetuneSettings, options).output_dir)).parts == ("runs", "1")
    (tmp_path / "runs" / "1").mkdir(parents=True)
    assert Path(str(parse_settings(FinetuneSettings, options).output_dir)).parts == ("runs", "2")
    with pytest.raises(ValueError, match="resume"):
        parse_settings(FinetuneSettings, [*options, "--resume"])


def test_the_recipe_auto_is_the_default_of_finetune_without_a_length():
    asked = []

    def plan(values):
        asked.append(values)
        return {"epochs": 3.0, "batch_size": 8}

    settings = parse_settings(FinetuneSettings, ["ti16", "digits", "out", "--batch-size", "16"], plan=plan)
    assert (settings.epochs, settings.batch_size, len(asked)) == (3, 16, 1)
    parse_settings(FinetuneSettings, ["ti16", "digits", "out", "--steps", "9"], plan=plan)
    parse_settings(FinetuneSettings, ["ti16", "digits", "out", "--recipe", "finetune_small"], plan=plan)
    assert len(asked) == 1


@pytest.mark.parametrize("text", ["224x320", "224,320", "[224, 320]"])
def test_sizes_as_other_commands_take_them(text):
    assert parse_settings(FinetuneSettings, [*FINETUNE, "ti16", "--image-size", text]).image_size == [224, 320]


@pytest.mark.parametrize("settings", [FinetuneSettings, PretrainSettings, EvaluateSettings, AuditSettings])
def test_help_has_the_everyday_settings_first_and_all_on_request(settings, capsys, monkeypatch):
    texts = []
    for argument in ("", "all"):
        with pytest.raises(SystemExit):
            parse_settings(settings, ["--help", *argument.split()], "hf-vit command")
        texts.append(capsys.readouterr().out)
    options = [set(re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE)) for text in texts]
    everything = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(settings)}
    assert everything | {"--push", "--job"} <= options[1]
    assert {"--dataset", "--output-dir"} <= options[0] < options[1]
    assert f"hf-vit {settings.__name__.removesuffix('Settings').lower()}" in texts[0]  # an example


def test_words_too_many():
    with pytest.raises(ValueError, match="ti16"):
        parse_settings(FinetuneSettings, [*FINETUNE, "ti16", "--model", "other"])
    with pytest.raises(ValueError, match="photographs"):
        parse_settings(FinetuneSettings, ["ti16", "photographs", *FINETUNE])
    with pytest.raises(ValueError, match="ti16"):
        parse_settings(PretrainSettings, ["ti16", *FINETUNE])


@pytest.mark.parametrize("name", ["2026_11_26", "2026-11-26", "007", "1.10", "yes"])
def test_a_folder_may_look_like_a_number_or_a_date(name):
    """YAML 1.1 reads the first one as 20261126."""
    settings = parse_settings(FinetuneSettings, [*FINETUNE, "ti16", "--output-dir", name])
    assert settings.output_dir == name


def test_names_of_other_libraries_lead_to_ours():
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(FinetuneSettings)}
    assert set(SAME_ELSEWHERE.values()) <= fields
    assert not fields & set(SAME_ELSEWHERE)
    settings = parse_settings(FinetuneSettings, [*FINETUNE, "ti16", "--lr", "0.5", "--img_size=24"])
    assert (settings.learning_rate, settings.image_size) == (0.5, 24)
    with pytest.raises(ValueError, match="--lr"):
        parse_settings(EvaluateSettings, ["ti16", "--dataset", "digits", "--lr", "0.5"])
