"""The manifest of a pushed folder: a file that differs from the pushed one is refused."""

import hashlib
import json
import os

import pytest

from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.loading import load
from hf_vit.models import utils as module
from hf_vit.models.utils import MANIFEST, check_files, manifest_text

from ..tiny_models import save_tiny


@pytest.fixture
def pushed(tmp_path, monkeypatch):
    """A folder with a manifest and more than 1 MiB of weights; the cache of hashed weights is empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    folder = save_tiny(tmp_path / "folder", intermediate_size=4000)
    entries = {"not_downloaded.bin": {"size": 1, "sha256": "0"}}
    for file in folder.glob("[!.]*"):
        content = file.read_bytes()
        entries[file.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST).write_text(manifest_text(entries))
    return folder


@pytest.fixture
def hashed(monkeypatch):
    """Names of the files that are hashed."""
    names, true = [], module.sha256_of
    monkeypatch.setattr(module, "sha256_of", lambda file: names.append(file.name) or true(file))
    return names


def flip(file, place=-20):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["load", "from_pretrained"])
@pytest.mark.parametrize("before", ["never loaded", "loaded before"])
def test_weights_with_a_flipped_bit_are_refused(kind, before, pushed):
    load_it = load if kind == "load" else HfViTForImageClassification.from_pretrained
    if before == "loaded before":
        load_it(pushed)
    flip(pushed / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_it(pushed)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_another_configuration_is_refused(name, pushed):
    (pushed / name).write_text((pushed / name).read_text() + " ")
    with pytest.raises(ValueError, match=name):
        load(pushed)


def test_weights_are_hashed_once_and_again_on_request(pushed, hashed):
    for verify, count in ((False, 1), (False, 1), (True, 2)):
        load(pushed, verify=verify)
        assert hashed.count("model.safetensors") == count
    assert hashed.count("config.json") == 3


def test_changed_bits_with_an_unchanged_time_stamp_are_found_by_verify(pushed):
    load(pushed)
    status = (pushed / "model.safetensors").stat()
    flip(pushed / "model.safetensors")
    os.utime(pushed / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    load(pushed)
    with pytest.raises(ValueError, match="sha256"):
        load(pushed, verify=True)


def test_saving_again_removes_our_manifest_and_keeps_foreign_files(pushed):
    model = load(pushed)[0]
    model.save_pretrained(pushed)
    assert not (pushed / MANIFEST).exists()
    for text in ("[]", "{", "[" * 100_000, '{"name": "my web page", "files": []}'):
        (pushed / MANIFEST).write_text(text)
        model.save_pretrained(pushed)
        assert (pushed / MANIFEST).read_text() == text
    load(pushed)


@pytest.mark.parametrize("part", ["model", "config", "processor"])
def test_saving_a_part_again_leaves_a_folder_that_loads(part, pushed):
    model, processor = load(pushed)
    model.config.id2label = {number: f"class {number}" for number in model.config.id2label}
    processor.image_mean = [0.25] * 3
    {"model": model, "config": model.config, "processor": processor}[part].save_pretrained(pushed)
    load(pushed)


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "a/../../secret"])
def test_files_outside_the_folder_are_refused(name, pushed):
    (pushed / MANIFEST).write_text(manifest_text({name: {"size": 1, "sha256": "0"}}))
    with pytest.raises(ValueError, match="outside"):
        load(pushed)


def test_a_damaged_manifest_does_not_switch_its_check_off(pushed):
    text = (pushed / MANIFEST).read_text()
    other_version, other_field = text.replace("version 1", "version 7"), text.replace('"format"', '"f"')
    files = (None, [], {"a": None}, {"a": {"size": "x", "sha256": "b"}}, {"a": {"size": 3}})
    with_other_files = [json.dumps({**json.loads(text), "files": value}) for value in files]
    for damaged in (text[: len(text) // 2], "", other_version, other_field, *with_other_files):
        (pushed / MANIFEST).write_text(damaged)
        with pytest.raises(ValueError, match=MANIFEST):
            load(pushed)


def test_hf_vit_verify(pushed, run_command):
    told = run_command(["verify", pushed])
    assert told.startswith("3 files ")
    assert ": config.json, model.safetensors, " in told
    assert told.endswith("not_downloaded.bin\n")
    flip(pushed / "model.safetensors")
    assert run_command(["verify", pushed], status=2).startswith(f"hf-vit verify: {pushed / 'model.safetensors'} ")
    (pushed / MANIFEST).unlink()
    assert "manifest.json" in run_command(["verify", pushed], status=2)


def test_without_a_writable_cache_files_are_hashed_every_time(pushed, hashed, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "file" / "below"))
    for _ in range(2):
        assert check_files(pushed / MANIFEST) == ["config.json", "model.safetensors", "preprocessor_config.json"]
    assert hashed.count("model.safetensors") == 2
    assert isinstance(HfViTImageProcessor.from_pretrained(pushed), HfViTImageProcessor)
