"""The manifest of a pushed folder: a file that differs from the pushed one is refused."""

import hashlib
import json
import os

import pytest
import torch

from hf_vit import add_code
from hf_vit.files import manifest as module
from hf_vit.files.manifest import MANIFEST, check_files, manifest_text
from hf_vit.loading import load

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


@pytest.mark.parametrize("before", ["never loaded", "loaded before"])
def test_weights_with_a_flipped_bit_are_refused(before, pushed):
    if before == "loaded before":
        load(pushed)
    flip(pushed / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load(pushed)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_another_configuration_is_refused(name, pushed):
    (pushed / name).write_text((pushed / name).read_text() + " ")
    with pytest.raises(ValueError, match=name):
        load(pushed)


def test_weights_are_hashed_once_and_again_on_request(pushed, hashed):
    for _ in range(2):
        load(pushed)
        assert hashed.count("model.safetensors") == 1
    assert hashed.count("config.json") == 2
    check_files(pushed / MANIFEST, thorough=True)
    assert hashed.count("model.safetensors") == 2


def test_changed_bits_with_an_unchanged_time_stamp_are_found_by_verify(pushed):
    load(pushed)
    status = (pushed / "model.safetensors").stat()
    flip(pushed / "model.safetensors")
    os.utime(pushed / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    load(pushed)
    with pytest.raises(ValueError, match="sha256"):
        check_files(pushed / MANIFEST, thorough=True)


@pytest.mark.parametrize("text", ["[]", '{"name": "my web page", "files": []}'])
def test_a_manifest_of_another_program_is_ignored(text, pushed):
    (pushed / MANIFEST).write_text(text)
    flip(pushed / "model.safetensors")
    load(pushed)


@pytest.mark.parametrize("part", ["model", "config", "processor"])
def test_a_part_that_was_saved_again_is_refused_until_the_manifest_is_deleted(part, pushed):
    """transformers' `save_pretrained` knows no manifest."""
    model, processor = load(pushed)
    with torch.no_grad():
        model.classifier.bias += 1
    model.config.id2label = {number: f"class {number}" for number in model.config.id2label}
    processor.image_mean = [0.25] * 3
    {"model": model, "config": model.config, "processor": processor}[part].save_pretrained(pushed)
    with pytest.raises(ValueError, match=f"delete {MANIFEST}"):
        load(pushed)
    (pushed / MANIFEST).unlink()
    load(pushed)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "preprocessor_config.json"])
def test_one_flipped_bit_in_a_name_does_not_switch_a_check_off(name, pushed):
    file = pushed / MANIFEST
    flip(file, file.read_bytes().index(b'"' + name.encode() + b'"') + 2)
    with pytest.raises(ValueError, match=f"{name} is not listed"):
        load(pushed)


@pytest.mark.parametrize("name", ["features.safetensors", "notes.json", "README.md", "vit.onnx"])
def test_the_users_own_files_need_not_be_listed(name, pushed):
    (pushed / name).touch()
    load(pushed)


def test_code_that_is_added_is_listed(pushed):
    add_code(pushed)
    assert "modeling_hf_vit.py" in check_files(pushed / MANIFEST, thorough=True)
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
    assert told.startswith("4 files ")
    assert ": README.md, config.json, model.safetensors, " in told
    assert told.endswith("not_downloaded.bin\n")
    flip(pushed / "model.safetensors")
    assert run_command(["verify", pushed], status=2).startswith(f"hf-vit verify: {pushed / 'model.safetensors'} ")
    (pushed / MANIFEST).unlink()
    assert "manifest.json" in run_command(["verify", pushed], status=2)


def test_without_a_writable_cache_files_are_hashed_every_time(pushed, hashed, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "file" / "below"))
    for _ in range(2):
        assert "model.safetensors" in check_files(pushed / MANIFEST)
    assert hashed.count("model.safetensors") == 2


def test_an_adapter_and_its_base_are_checked(pushed, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = load(pushed)[0]
    adapter = tmp_path / "adapter"
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(adapter)
    load(adapter)
    flip(pushed / "preprocessor_config.json")
    with pytest.raises(ValueError, match="preprocessor_config"):
        load(adapter)
    flip(pushed / "preprocessor_config.json")
    (adapter / MANIFEST).write_text(manifest_text({}))
    with pytest.raises(ValueError, match="adapter_"):
        load(adapter)


def test_a_removed_argument_is_named(pushed):
    with pytest.raises(ValueError, match="hf-vit verify"):
        load(pushed, verify=True)
