"""Cache of programs on disk: reuse, damaged entries, size limit."""

import os
import time

import pytest
import torch
from huggingface_hub import constants

from hf_vit.backends import program_cache
from hf_vit.backends.program_cache import cache_folder, cached

from ..tiny_models import images, tiny


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))


def logits_of(**fields) -> torch.Tensor:
    model = tiny(**fields).optimize_for_inference(backend="openvino")
    with torch.inference_mode():
        return model(images(model)).logits


def test_a_cached_program_is_not_converted_again(quick):
    first = logits_of()
    assert torch.equal(logits_of(), first)
    assert quick.made == 1
    assert not torch.equal(logits_of(seed=1), first)
    assert torch.equal(logits_of(layer_norm_eps=0.5), logits_of(layer_norm_eps=0.5))
    assert quick.made == 3
    assert [file.name for file in next(cache_folder().iterdir()).iterdir() if file.suffix] == ["entry.json"]


def break_bytes(entry):
    content = bytearray((entry / "program").read_bytes())
    content[len(content) // 2] ^= 1
    (entry / "program").write_bytes(content)


DAMAGES = {
    "a bit": break_bytes,
    "cut": lambda entry: os.truncate(entry / "program", 100),
    "gone": lambda entry: (entry / "program").unlink(),
    "more": lambda entry: (entry / "other").write_text("x"),
    "no sums": lambda entry: (entry / "entry.json").unlink(),
    "sums of another kind": lambda entry: (entry / "entry.json").write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_converted_again(quick, damage):
    first = logits_of()
    (entry,) = cache_folder().iterdir()
    damage(entry)
    assert torch.equal(logits_of(), first)
    assert torch.equal(logits_of(), first)
    assert quick.made == 2


def test_an_entry_that_cannot_be_loaded_is_converted_again():
    made = []

    def load(folder):
        if len(made) < 2:
            raise RuntimeError("of another version")
        return (folder / "program").read_text()

    def make(folder):
        made.append(1)
        (folder / "program").write_text("x")

    with pytest.raises(RuntimeError):
        cached("a", make, load)
    assert not list(cache_folder().iterdir())
    assert cached("a", make, load) == cached("a", make, load) == "x"
    assert len(made) == 2


def test_the_least_recently_used_entries_are_deleted(monkeypatch):
    monkeypatch.setenv("HF_VIT_PROGRAM_CACHE", str(2500 / 2**30))

    def use(name):
        time.sleep(0.01)
        cached(name, lambda folder: (folder / "program").write_bytes(bytes(1000)) and None, lambda folder: folder)

    for name in ("a", "b", "a", "c"):
        use(name)
    assert {entry.name for entry in cache_folder().iterdir()} == {"a", "c"}


def test_the_cache_can_be_disabled(monkeypatch, tmp_path):
    def make(folder):
        (folder / "program").write_text("x")

    def load(folder):
        return (folder / "program").read_text()

    monkeypatch.setenv("HF_VIT_PROGRAM_CACHE", "0")
    assert cached("a", make, load) == "x"
    assert not cache_folder().exists()
    monkeypatch.setenv("HF_VIT_PROGRAM_CACHE", "much")
    with pytest.raises(ValueError, match=r"HF_VIT_PROGRAM_CACHE is 'much' \(expected GiB"):
        cached("a", make, load)
    monkeypatch.delenv("HF_VIT_PROGRAM_CACHE")
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path))
    (tmp_path / "hf_vit").write_text("a file where the folder should be")
    assert cached("a", make, load) == "x"
    assert program_cache.cache_folder() == tmp_path / "hf_vit" / "programs"
