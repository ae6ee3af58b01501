"""Text formats from strangers: small files that would take a machine."""

import time

import pytest

from hf_vit.files.reading import parse_json, parse_yaml


@pytest.mark.parametrize("text", ["x: 1" + ":1" * 200_000, "x: 190:20:30.15", "start: 12:30:45"])
def test_numbers_of_base_60_are_refused(text):
    start = time.monotonic()
    with pytest.raises(ValueError, match="base 60"):
        parse_yaml(text, "recipe.yaml")
    assert time.monotonic() - start < 5
    assert parse_yaml("x: '12:30'", "recipe.yaml") == {"x": "12:30"}


def test_very_many_lists_are_refused():
    for parse, text in ((parse_yaml, "- []\n" * 300_000), (parse_json, f"[{'[],' * 2_000_000}[]]")):
        with pytest.raises(ValueError, match="more than"):
            parse(text, "stranger.txt")
