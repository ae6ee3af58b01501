"""Identities of models and data, and their use in features, results of VTAB, and resumed runs."""

import json
import os
import shutil

import numpy as np
import pytest
from huggingface_hub import constants

from hf_vit.data import fingerprint as module
from hf_vit.data import splits
from hf_vit.data.fingerprint import fingerprint_data, fingerprint_model
from hf_vit.data.sources import load_split
from hf_vit.data.splits import open_named
from hf_vit.files.manifest import sha256_of
from hf_vit.settings.fields import EvaluateSettings

from ..commands import evaluate, finetune, pretrain
from ..comparing import change_json
from ..photographs import table_of, write_colors
from ..processes import ONE_STEP, arguments
from ..tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("fresh_accelerator", "blank_figures")


@pytest.fixture
def tiny(tmp_path):
    return save_tiny(tmp_path / "tiny", patch_size=4, representation_size=10)


@pytest.fixture
def colors(tmp_path):
    """Pictures of three colors, 8 of each to learn from and 4 to measure on."""
    return write_colors(tmp_path / "colors", suffix="bmp", train=8, test=4)


def replace_in_silence(folder, like):
    """Pictures of another color in the place of those of a class: same names, sizes and times."""
    for file in folder.iterdir():
        before = file.stat()
        shutil.copyfile(like / file.name, file)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_size == before.st_size


def data_of(dataset, **changes):
    settings = EvaluateSettings(dataset=str(dataset), **changes)
    return fingerprint_data(open_named(settings, "train"))


def test_model_identity_is_weights_config_processor_and_code(tiny, tmp_path, monkeypatch):
    first = fingerprint_model(str(tiny))
    shutil.copytree(tiny, tmp_path / "same")
    (tmp_path / "same" / "metrics.json").write_text("{}")
    assert fingerprint_model(str(tmp_path / "same")) == first
    change_json(tmp_path / "same" / "config.json", hidden_act="relu")
    other = save_tiny(tmp_path / "other", patch_size=4, representation_size=9)
    shutil.copytree(tiny, tmp_path / "resized")
    processor = tmp_path / "resized" / "preprocessor_config.json"
    processor.write_text(processor.read_text().replace("vit_jax", "timm"))
    found = [fingerprint_model(str(folder)) for folder in (tmp_path / "same", other, tmp_path / "resized")]
    monkeypatch.setattr(module, "versions_of", lambda packages: dict.fromkeys(packages, "99"))
    found.append(fingerprint_model(str(tiny)))
    assert all(identity != first for identity in found)


def test_hub_model_identity_is_its_commit(tiny, tmp_path, monkeypatch):
    """In a cache as huggingface_hub lays it out."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache" / "models--alice--tiny"
    (repository / "refs").mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tiny, repository / "snapshots" / commit)
        (repository / "refs" / "main").write_text(commit)
        identity = fingerprint_model("alice/tiny")
        assert (identity["name"], identity["commit"]) == ("alice/tiny", commit)


def test_data_identity_is_the_content(colors, tmp_path):
    first = data_of(colors)
    shutil.copytree(colors, tmp_path / "moved")
    assert data_of(tmp_path / "moved") == first
    replace_in_silence(colors / "train" / "red", colors / "train" / "green")
    assert data_of(colors) != first
    (tmp_path / "moved" / "train" / "red").rename(tmp_path / "moved" / "train" / "rose")
    assert data_of(tmp_path / "moved") != first


def test_identity_of_large_data_is_the_sizes_and_a_part_of_the_content(colors, tmp_path, monkeypatch):
    """It does not depend on paths and times, for files and for tables."""
    monkeypatch.setattr(module, "_MOST_BYTES", 2000)  # of 24 images of 824 bytes
    (tmp_path / "table").mkdir()
    images = [np.full((20, 20, 3), number, np.uint8) for number in range(24)]
    table_of(images, [0, 1] * 12, ["dark", "bright"]).to_parquet(tmp_path / "table" / "train.parquet")
    first, in_a_table = data_of(colors), data_of(tmp_path / "table")
    assert first.keys() == in_a_table.keys() == {"content", "images"}
    for folder, expected in ((colors, first), (tmp_path / "table", in_a_table)):
        moved = shutil.copytree(folder, tmp_path / "moved", copy_function=shutil.copyfile)
        assert data_of(moved) == expected
        shutil.rmtree(moved)
    changed = colors / "train" / "red" / "3.bmp"
    changed.write_bytes(changed.read_bytes() + b"0")
    assert data_of(colors) != first


def test_identity_of_shards_is_their_names_and_stamps(colors, tmp_path):
    (tmp_path / "shards").mkdir()
    load_split(str(colors), "train").to_parquet(tmp_path / "shards" / "train.parquet")
    first = data_of(tmp_path / "shards", streaming=True)
    assert first.keys() == {"shards", "images"}
    (tmp_path / "shards").rename(tmp_path / "moved")
    assert data_of(tmp_path / "moved", streaming=True) == first
    os.utime(tmp_path / "moved" / "train.parquet", (1, 1))
    assert data_of(tmp_path / "moved", streaming=True) != first


@pytest.mark.parametrize("change", ["heads", "training images"])
def test_cached_features_of_other_data_are_not_used(tiny, colors, tmp_path, change):
    """The model has the same weights and another configuration; the images are others in files of the same names."""
    settings = {"model": tiny, "dataset": colors, "num_workers": 0, "protocol": "linear_probe", "probe_l2": "0.1"}
    before = evaluate(arguments(**settings, output_dir=tmp_path / "out"))
    if change == "heads":
        change_json(tiny / "config.json", num_attention_heads=7, hidden_act="relu")
    else:
        replace_in_silence(colors / "train" / "red", colors / "train" / "green")
    after = evaluate(arguments(**settings, output_dir=tmp_path / "out"))
    assert after == evaluate(arguments(**settings))
    assert after["loss"] != before["loss"]


@pytest.mark.parametrize("change", ["model", "data"])
def test_a_run_of_another_model_or_changed_data_is_not_resumed(tiny, colors, tmp_path, change):
    settings = {"model": tiny, "dataset": colors, "steps": 2, "batch_size": 4, "save_every": 2, "num_workers": 0}
    settings |= {"report_to": "none", "output_dir": tmp_path / "out", "resume": "true"}
    for _ in range(2):
        finetune(arguments(**settings))
    if change == "model":
        change_json(tiny / "config.json", hidden_act="relu")
    else:
        replace_in_silence(colors / "train" / "red", colors / "train" / "green")
    images = ", images 24" if change == "data" else ""
    with pytest.raises(ValueError, match=rf"\w{{12}}{images} .* \w{{12}}{images}$"):
        finetune(arguments(**settings))


def test_a_run_is_resumed_where_its_data_and_model_were_moved(tiny, colors, tmp_path, monkeypatch):
    """Their content is compared: another spelling of a path is the same, and so is a copy."""
    monkeypatch.chdir(tmp_path)
    issues = tmp_path / "issues.csv"
    issues.write_text("image\ntrain/red/0.bmp\n")
    settings = {"model": tiny, "dataset": colors, "exclude": issues, "batch_size": 4, "save_every": 2, "num_workers": 0}
    settings |= {"schedule": "constant", "report_to": "none", "output_dir": tmp_path / "out", "resume": "true"}
    finetune(arguments(**settings, steps=2))
    finetune(arguments(**settings | {"dataset": "./colors/", "model": "tiny", "exclude": "issues.csv"}, steps=3))
    moved = {"dataset": colors.rename(tmp_path / "moved"), "exclude": issues.rename(tmp_path / "others.csv")}
    moved |= {"model": tiny.rename(tmp_path / "model")}
    finetune(arguments(**settings | moved, steps=4))
    moved["exclude"].write_text("image\ntrain/red/1.bmp\n")
    with pytest.raises(ValueError, match="images 23"):
        finetune(arguments(**settings | moved, steps=5))


def test_a_run_with_other_held_out_images_is_not_resumed(tiny, colors, tmp_path, monkeypatch):
    """As if an earlier version had divided the images in another way."""
    (colors / "test").rename(tmp_path / "unused")
    settings = {"model": tiny, "dataset": colors, "steps": 2, "batch_size": 4, "num_workers": 0, "report_to": "none"}
    settings |= {"output_dir": tmp_path / "out", "resume": "true", "schedule": "constant"}
    finetune(arguments(**settings))
    divide = splits.split_off_holdout
    monkeypatch.setattr(splits, "split_off_holdout", lambda split, fraction: divide(split, 2 * fraction))
    with pytest.raises(ValueError, match="held-out"):
        finetune(arguments(**settings | {"steps": 3}))


def test_a_run_of_an_earlier_version_is_resumed(tmp_path):
    """Its checkpoint lacks a new setting, which must have its default."""
    settings = {**ONE_STEP, "steps": 2, "save_every": 2, "output_dir": tmp_path}
    pretrain(arguments(**settings))
    file = tmp_path / "checkpoints" / "step_00000002" / "state.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    del state["settings"]["head"], state["settings"]["cooldown_steps"]
    file.write_text(json.dumps(state), encoding="utf-8")
    change_json(file.with_name("checksums.json"), **{"state.json": sha256_of(file)})
    pretrain(arguments(**settings, resume="true"))
    with pytest.raises(ValueError, match="cooldown_steps"):
        pretrain(arguments(**settings, resume="true", cooldown_steps=1))
