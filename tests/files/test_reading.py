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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 100_000, "nested|recursion"),
        (b"[" * 40 + b"]" * 40, "32 levels"),
        (b'{"a": 1', "Expecting"),
        (b"", "Expecting"),
        (b'{"a": 1}{"b": 2}', "Extra data"),
        (b'{"a": 1, "b": {"a": 2, "a": 3}}', "'a' twice"),
        (b'{"a": 01}', "Expecting"),
        (b'{"a": ' + b"1" * 5_000 + b"}", "4300 digits"),
        (b"\xff\xfe{\0}\0", "UTF-8"),
        (b"[1, 2]", "JSON object"),
        (b"null", "JSON object"),
    ],
)
def test_damaged_json_is_one_sentence_that_names_the_file(text, reason, tmp_path):
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(ValueError, match=reason) as error:
        reading.read_json_object(tmp_path / "x.json")
    assert "x.json" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_json_with_a_byte_order_mark_is_read(tmp_path):
    """Windows' Notepad wrote one until 2019."""
    (tmp_path / "x.json").write_bytes('{"a": "\u00e4"}'.encode("utf-8-sig"))
    assert reading.read_json_object(tmp_path / "x.json") == {"a": "\u00e4"}
