"""Text formats from strangers: small files that would take a machine."""

import time

import pytest

from hf_vit.files import reading


@pytest.mark.parametrize("text", ["x: 1" + ":1" * 200_000, "x: 190:20:30.15", "start: 12:30:45"])
def test_numbers_of_base_60_are_refused(text):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"YAML 1\.1"):
        reading.parse_yaml(text, "recipe.yaml")
    assert time.monotonic() - start < 5
    assert reading.parse_yaml("x: '12:30'", "recipe.yaml") == {"x": "12:30"}


def test_very_many_lists_are_refused(monkeypatch):
    assert reading.MAX_NODES <= 200_000  # 2 KB each in memory
    monkeypatch.setattr(reading, "MAX_NODES", 1_000)
    for parse, text in ((reading.parse_yaml, "- []\n" * 1_000), (reading.parse_json, f"[{'[],' * 2_000_000}[]]")):
        with pytest.raises(ValueError, match=r"1,000|1,048,576"):
            parse(text, "stranger.txt")
    assert reading.parse_yaml("- []\n" * 999, "stranger.txt") == [[]] * 999
