"""Cache of programs on disk: reuse, damaged entries, size limit."""

import time

import pytest
from huggingface_hub import constants

from hf_vit.runtimes.program_cache import cache_folder, cached


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))


class Maker:
    """Makes a program that is a text, and counts how often."""

    made = 0

    def make(self, folder):
        self.made += 1
        (folder / "program").write_text("x" * 200)

    def get(self, identity="a", load=lambda folder: (folder / "program").read_text()):
        return cached(identity, self.make, load)


DAMAGES = {
    "a bit": lambda entry: (entry / "program").write_text("x" * 100 + "y" + "x" * 99),
    "gone": lambda entry: (entry / "program").unlink(),
    "no JSON": lambda entry: (entry / "manifest.json").write_text("hf_vit"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_made_again(damage):
    maker = Maker()
    assert maker.get() == maker.get() == "x" * 200
    assert maker.made == 1
    damage(cache_folder() / "a")
    assert maker.get() == maker.get() == "x" * 200
    assert maker.made == 2


def test_an_entry_that_cannot_be_loaded_is_converted_again():
    maker = Maker()

    def load(folder):
        if maker.made < 2:
            raise RuntimeError("of another version")
        return (folder / "program").read_text()

    with pytest.raises(RuntimeError):
        maker.get("a", load)
    assert not list(cache_folder().glob("*"))
    assert maker.get("a", load) == maker.get("a", load) == "x" * 200
    assert maker.made == 2


def test_the_least_recently_used_entries_are_deleted(monkeypatch):
    monkeypatch.setenv("HF_VIT_PROGRAM_CACHE", str(25_000 / 2**30))

    def make(folder):
        (folder / "program").write_bytes(bytes(10_000))

    for name in ("a", "b", "a", "c"):
        time.sleep(0.01)
        cached(name, make, lambda folder: folder)
    assert {entry.name for entry in cache_folder().iterdir()} == {"a", "c"}


def test_programs_that_are_not_cached(monkeypatch, tmp_path):
    """Without an identity, with a limit of zero, and in a folder that cannot be made."""
    maker = Maker()
    assert maker.get(None) == maker.get(None) == "x" * 200
    assert maker.made == 2
    monkeypatch.setenv("HF_VIT_PROGRAM_CACHE", "0")
    assert maker.get() == "x" * 200
    assert not cache_folder().exists()
    monkeypatch.delenv("HF_VIT_PROGRAM_CACHE")
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path))
    (tmp_path / "hf_vit").write_text("a file where the folder should be")
    assert maker.get() == "x" * 200
    assert cache_folder() == tmp_path / "hf_vit" / "programs"
