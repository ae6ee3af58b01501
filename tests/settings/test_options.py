"""Command line of the training scripts: the model as a word, and option names of other libraries."""

import dataclasses

import pytest

from hf_vit.settings.fields import EvaluateSettings, FinetuneSettings, PretrainSettings
from hf_vit.settings.options import parse_settings
from hf_vit.settings.parser import SAME_ELSEWHERE

FINETUNE = "--dataset digits --epochs 1 --output-dir out".split()


@pytest.mark.parametrize("position", range(0, len(FINETUNE) + 1, 2))
def test_the_model_is_a_word_at_any_position(position):
    arguments = [*FINETUNE[:position], "ti16", *FINETUNE[position:]]
    assert parse_settings(FinetuneSettings, arguments) == parse_settings(FinetuneSettings, [*FINETUNE, "--model=ti16"])
    assert parse_settings(EvaluateSettings, ["ti16", "--dataset", "digits"]).model == "ti16"


def test_words_too_many():
    with pytest.raises(ValueError, match="other"):
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
    with pytest.raises(ValueError, match="output-dir"):
        parse_settings(FinetuneSettings, [*FINETUNE, "ti16", "--output-dir", "none"])


def test_names_of_other_libraries_lead_to_ours():
    fields = {field.name.replace("_", "-") for field in dataclasses.fields(FinetuneSettings)}
    assert set(SAME_ELSEWHERE.values()) <= fields
    assert not fields & set(SAME_ELSEWHERE)
    settings = parse_settings(FinetuneSettings, [*FINETUNE, "ti16", "--lr", "0.5", "--img_size=24"])
    assert (settings.learning_rate, settings.image_size) == (0.5, 24)
    with pytest.raises(ValueError, match="--lr"):
        parse_settings(EvaluateSettings, ["ti16", "--dataset", "digits", "--lr", "0.5"])
